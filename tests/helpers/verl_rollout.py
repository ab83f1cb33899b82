"""verl's own agent loops and server clients, on a rollout engine that answers as it is told.

For processes of tests/trainers; everything is in this process, without Ray actors.
"""

import functools
import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

NUM_EXPERTS, LAYERS, TOPK = 64, 2, 2
PROMPT_LENGTH, RESPONSE_LENGTH = 64, 160
TOOL_CALL = '<tool_call>{"name":"unknown","arguments":{}}</tool_call>'  # answered with an error


@dataclass(frozen=True)
class Answer:
    """What the engine returns for one call.

    `rows`: "but one" (no row for the last token, as engines do), "all" (filling for the last),
    "none", "empty", or "new" (of the generated tokens only).
    """

    text: str
    rows: str = "but one"
    stop: str = "completed"


def routes(tokens: Sequence[int]) -> NDArray[np.int32]:
    """The engine's experts, int32 [tokens, layers, topk]: of no two tokens nearby the same."""
    at = np.arange(len(tokens)).reshape(-1, 1)
    first = np.arange(LAYERS) * 5 + at * 7 + np.asarray(tokens, dtype=int).reshape(-1, 1)
    both = [first % NUM_EXPERTS, (first + 1 + at % 3) % NUM_EXPERTS]
    return np.stack(both, axis=2).astype(np.int32)


class Engine:
    """A server's handle and its load balancer. Samples are told apart by the digit after a #.

    Args:
        answers: for each sample those of its calls.
    """

    def __init__(self, tokenizer: Any, answers: Sequence[Sequence[Answer]]) -> None:
        self.tokenizer = tokenizer
        self.answers: list[Iterator[Answer]] = [iter(each) for each in answers]
        self.handle_too = True  # acquire_server returns it; 0.7.1 has it by name
        self.captured = [0] * len(answers)
        """For each sample how many tokens from the start have a row in some call."""

    def __getattr__(self, name: str) -> Any:
        return _Remote(getattr(type(self), f"_{name}").__get__(self))

    async def _require_acquire_fields(self) -> list[str]:
        return []

    async def _require_release_fields(self) -> list[str]:
        return []

    async def _acquire_server(self, **_: Any) -> Any:
        return ("server", self) if self.handle_too else "server"

    def _release_server(self, **_: Any) -> None:
        pass

    async def _generate(self, prompt_ids: Any, **_: Any) -> Any:
        from verl.workers.rollout.replica import TokenOutput

        ids = prompt_ids["input_ids"] if isinstance(prompt_ids, Mapping) else prompt_ids
        prompt = list(ids)
        text = self.tokenizer.decode(prompt)
        sample = int(text[text.index("#") + 1])
        answer = next(self.answers[sample])
        tokens = self.tokenizer.encode(answer.text, add_special_tokens=False)
        rows = routes([*prompt, *tokens])
        rows[-1] = 0  # it was never fed forward
        kinds = {
            "all": rows,
            "but one": rows[:-1],
            "none": None,
            "empty": rows[:0],
            "new": rows[len(prompt) :],
        }
        given = kinds[answer.rows]
        held = 0 if given is None else min(len(given), len(rows) - 1)
        self.captured[sample] = max(self.captured[sample], held)
        return TokenOutput(
            token_ids=tokens,
            log_probs=[0.0] * len(tokens),
            routed_experts=given,
            stop_reason=answer.stop,
        )


class _Remote:
    def __init__(self, method: Any) -> None:
        self.remote = method


def model(folder: Path) -> Path:
    """A model's folder without weights: a configuration, and a tokenizer of single characters."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig

    special = ["<pad>", "<|im_start|>", "<|im_end|>", "\n"]
    characters = [*special, *map(chr, range(32, 127))]
    vocabulary = {character: number for number, character in enumerate(characters)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(?m)."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    message = "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    answer = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template="{% for m in messages %}" + message + "{% endfor %}" + answer,
    ).save_pretrained(folder)
    Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        vocab_size=len(vocabulary),
        hidden_size=16,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=TOPK,
    ).save_pretrained(folder)
    return folder


@functools.cache
def config(folder: Path, replay: bool = True, flat: bool = False) -> Any:
    """verl's own default configuration, with R3's rollout option.

    `flat`: the rollout's part without `actor_rollout_ref` above it, which 0.7.1 takes too.
    """
    import verl
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    rollout = {
        "name": "vllm",
        "prompt_length": PROMPT_LENGTH,
        "response_length": RESPONSE_LENGTH,
        "enable_rollout_routing_replay": replay,
        "multi_turn.max_assistant_turns": 4,
        "multi_turn.max_user_turns": 4,
    }
    overrides = [f"actor_rollout_ref.rollout.{key}={value}" for key, value in rollout.items()]
    overrides += [f"actor_rollout_ref.model.path={folder}", "+async_training.partial_rollout=True"]
    path = Path(verl.__file__).parent / "trainer" / "config"
    with initialize_config_dir(str(path), version_base=None):
        made = compose("ppo_trainer", overrides=overrides)
    if "use_reward_loop" in made.get("reward_model", {}):  # 0.7.0: an actor
        made.reward_model.use_reward_loop = False
    if flat:
        parts = OmegaConf.to_container(made, resolve=True)
        made = OmegaConf.create({**parts, **parts.pop("actor_rollout_ref")})
    return made


def worker(config: Any, engine: Engine, *, resuming: bool = False, cls: Any = None) -> Any:
    """verl's agent loop worker. `resuming`: with the client of partial rollouts."""
    from verl.experimental.agent_loop import agent_loop

    if hasattr(agent_loop, "AgentLoopWorkerBase"):  # 0.7.0
        return (cls or agent_loop.AgentLoopWorkerBase)(config, [engine])
    cls = cls or agent_loop.AgentLoopWorker
    if hasattr(agent_loop, "AsyncLLMServerManager"):  # 0.7.1
        engine.handle_too = False
        return cls(config, [("server", engine)], engine)
    client = resuming_client() if resuming else agent_loop.LLMServerClient
    return cls(config, client(config=config, load_balancer_handle=engine))


def resuming_client() -> Any:
    """verl's client that resumes aborted generations; None before 0.8."""
    for name in (
        "verl.workers.rollout.llm_server",
        "verl.experimental.fully_async_policy.fully_async_rollouter",
    ):
        try:
            return importlib.import_module(name).FullyAsyncLLMServerClient
        except (ImportError, AttributeError):
            continue
    return None


def batch(samples: int, agent: str, validate: bool = False) -> Any:
    """Prompts "#0", "#1x", "#2xx", ... for an agent loop."""
    from verl import DataProto

    prompts = np.empty(samples, dtype=object)
    for number in range(samples):
        prompts[number] = [{"role": "user", "content": f"#{number}" + "x" * number}]
    fields = {"raw_prompt": prompts, "agent_name": np.array([agent] * samples, dtype=object)}
    info = {"validate": validate, "global_steps": 3}
    return DataProto(batch=None, non_tensor_batch=fields, meta_info=info)


def compared(batch: Any, engine: Engine) -> str | list[list[int]]:
    """For each sample: real tokens, tokens whose row is the engine's, tokens without a row, and
    tokens that have a row in some call of the engine."""
    if "routed_experts" not in batch.batch:
        return "absent"
    found = []
    for number, captured in enumerate(engine.captured):
        real = batch.batch["attention_mask"][number].bool()
        tokens = batch.batch["input_ids"][number][real].tolist()
        rows = batch.batch["routed_experts"][number][real].numpy()
        right = int((rows == routes(tokens)).all(axis=(1, 2)).sum())
        without = int((rows < 0).all(axis=(1, 2)).sum())
        found.append([len(tokens), right, without, min(captured, len(tokens))])
    return found
