"""Routes on their way from verl's rollout servers to the batch, each release with its own code.

Each release has one process, which first does everything without the plugin, then activates it.
"""

import functools
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
from helpers import trainers

TRANSFORMERS_4 = {"transformers": "4.57.6", "huggingface-hub": "0.36.0", "datasets": "4.4.1"}
RELEASES: dict[str, dict[str, str]] = {
    "0.7.0": TRANSFORMERS_4,
    "0.7.1": {},
    "0.8.0": {},
    "0.9.1": {},
}
RESUMING = ("0.8.0", "0.9.1")

SCRIPT = """
import asyncio, functools, inspect, json, logging, sys, types
from pathlib import Path
from standins import rollout_engines
rollout_engines.install()
from helpers.verl_rollout import *
logging.disable(logging.WARNING)
sleep = asyncio.sleep
asyncio.sleep = lambda seconds: sleep(0)  # verl waits a second before it resumes

import ray
from ray import cloudpickle
from verl.trainer import main_ppo
from transformers import AutoTokenizer
from verl.experimental.agent_loop import agent_loop
from verl.workers.rollout.sglang_rollout import async_sglang_server as sglang_server
from verl.workers.rollout.vllm_rollout import vllm_async_server as vllm_server

folder = model(Path(FOLDER))
tokenizer = AutoTokenizer.from_pretrained(folder)
TOOL, ONE = "tool_agent", "single_turn_agent"
LONG = "z" * (RESPONSE_LENGTH + 20)
LOOPS = {
    "single turn": (ONE, [[Answer("one")], [Answer("all rows", "all")]]),
    "truncated": (ONE, [[Answer(LONG)], [Answer("short")]]),
    "tools": (TOOL, [[Answer(TOOL_CALL), Answer("done")], [Answer("no tool")]]),
    "truncated tools": (TOOL, [[Answer(TOOL_CALL), Answer(LONG)]]),
    "last turn without": (TOOL, [[Answer(TOOL_CALL), Answer("done", "none")]]),
    "a turn without": (TOOL, [[Answer(TOOL_CALL, "none"), Answer("done")]]),
    "no routes": (ONE, [[Answer("one")], [Answer("two", "none")], [Answer("three")]]),
    "first has none": (ONE, [[Answer("one", "none")], [Answer("two")]]),
    "new rows only": (ONE, [[Answer("generated", "new")]]),
    "in a thread": ("in a thread", [[Answer("one")]]),
    "in a thread, new rows only": ("in a thread", [[Answer("generated", "new")]]),
    "as tokenizers return prompts": ("tokenizer", [[Answer("one")]]),
}
PART = functools.partial(Answer, stop="aborted")
RESUMED = {
    "resumed": [[PART("abc"), PART(""), Answer("defg")], [Answer("whole")]],
    "a part without": [[PART("abc"), PART("defgh", "none"), PART("ij"), Answer("kl")]],
    "the last without": [[PART("abc"), Answer("defgh", "none")]],
    "resumed and cut": [[PART("abc"), Answer(LONG)]],
    "resumed after filling": [[PART("abc", "all"), PART("", "empty"), Answer("defg")]],
}

def run(agent, answers, *, replay=True, flat=False, validate=False, **options):
    async def rollout():
        of = worker(config(folder, replay, flat), engine, **options)
        return await of.generate_sequences(batch(len(answers), agent, validate))

    engine = Engine(tokenizer, answers)
    try:
        return compared(asyncio.run(rollout()), engine)
    except Exception as error:
        return f"{type(error).__name__}: {error}"

class Own(getattr(agent_loop, "AgentLoopWorkerBase", agent_loop.AgentLoopWorker)):
    '''A user's worker; it does with outputs what verl's for transfer queues does.'''

    async def _agent_loop_postprocess(self, output, *args, **kwargs):
        self.seen = [[len(one.prompt_ids) + len(one.response_ids), len(one.routed_experts)]
                     for one in output if one is not None]

    async def generate_sequences(self, batch):
        loop = {"step": 1, "sample_index": 0, "rollout_n": 0, "validate": False}
        await self._run_agent_loop({}, loop, agent_name="two outputs", trace=False, **batch)
        return self.seen

own_actor = ray.remote(Own).__ray_metadata__.modified_class  # made before the plugin is there

class TwoOutputs(agent_loop.AgentLoopBase):
    async def run(self, sampling_params, **kwargs):
        outputs = []
        for text in "#0 first", "#0 and second":
            ids = tokenizer.encode(text, add_special_tokens=False)
            got = await self.server_manager.generate(
                request_id="1", prompt_ids=ids, sampling_params=sampling_params)
            outputs.append(agent_loop.AgentLoopOutput(
                prompt_ids=ids, response_ids=got.token_ids, response_mask=[1] * len(got.token_ids),
                metrics=agent_loop.AgentLoopMetrics(), num_turns=1, extra_fields={}))
        return outputs

class InAThread(agent_loop.AgentLoopBase):
    '''It hands on the engine's rows, of calls that no task of verl's makes.'''

    async def run(self, sampling_params, **kwargs):
        loop, ids = asyncio.get_running_loop(), tokenizer.encode("#0 hello")
        call = lambda: asyncio.run_coroutine_threadsafe(self.server_manager.generate(
            request_id="1", prompt_ids=ids, sampling_params=sampling_params), loop).result()
        got = await loop.run_in_executor(None, call)
        return agent_loop.AgentLoopOutput(
            prompt_ids=ids, response_ids=got.token_ids, response_mask=[1] * len(got.token_ids),
            routed_experts=got.routed_experts, metrics=agent_loop.AgentLoopMetrics(), num_turns=1,
            extra_fields={})

class Tokenizer(agent_loop.AgentLoopBase):
    async def run(self, sampling_params, **kwargs):
        prompt = tokenizer("#0 hello")
        got = await self.server_manager.generate(
            request_id="1", prompt_ids=prompt, sampling_params=sampling_params)
        return agent_loop.AgentLoopOutput(
            prompt_ids=prompt["input_ids"], response_ids=got.token_ids,
            response_mask=[1] * len(got.token_ids), routed_experts=got.routed_experts,
            metrics=agent_loop.AgentLoopMetrics(), num_turns=1, extra_fields={})

OF_USERS = {"two outputs": TwoOutputs, "in a thread": InAThread, "tokenizer": Tokenizer}
for name, cls in OF_USERS.items():
    agent_loop._agent_loop_registry[name] = {"_target_": f"__main__.{cls.__name__}"}

def of_a_user():
    async def rollout():
        of = worker(config(folder), engine, cls=own_actor)
        return await of.generate_sequences({"raw_prompt": []})

    engine = Engine(tokenizer, [[Answer("one"), Answer("two")]])
    try:
        return asyncio.run(rollout())
    except Exception as error:
        return f"{type(error).__name__}: {error}"

LENGTHS = {"prompt_length": 10, "response_length": 20, "max_model_len": 40}

def asked(module, name, request, prompt, given):
    cls = getattr(module, name)
    metadata = getattr(cls, "__ray_metadata__", None)
    cls = metadata.modified_class if metadata else cls
    generate = cloudpickle.loads(cloudpickle.dumps(cls.generate))  # as Ray brings it to a server
    settings = types.SimpleNamespace(
        **LENGTHS, enable_rollout_routing_replay=True, full_determinism=False,
        get=lambda key, default=None: default)
    server = object.__new__(cls)
    for key, value in {"config": settings, "_disaggregation_role": None}.items():
        setattr(server, key, value)
    made = getattr(module, request).made
    made.clear()
    try:
        generate(server, prompt, dict(given), "id").send(None)
    except Exception as error:
        if not made:
            return f"{type(error).__name__}: {error}"
    got = made[-1].get("sampling_params", made[-1])
    return got.get("max_tokens", got.get("max_new_tokens"))

def limits():
    asks = [(1, {}), (10, {}), (25, {}), (30, {}), (38, {}), (5, {"max_tokens": 3}),
            (5, {"max_new_tokens": 33}), (5, {"max_tokens": 500}), (5, {"max_tokens": 0})]
    servers = {
        "vllm": (vllm_server, "vLLMHttpServer", "SamplingParams"),
        "sglang": (sglang_server, "SGLangHttpServer", "GenerateReqInput"),
    }
    out = {key: [asked(*server, [5] * prompt, given) for prompt, given in asks]
           for key, server in servers.items()}
    prompts = [[5] * 25], {"input_ids": [5] * 25}
    return out | {"forms": [asked(*servers["vllm"], prompt, {}) for prompt in prompts]}

def unpadded():
    '''Routes of four tokens, the last two without, on their way to a packed microbatch.'''
    import torch
    from tensordict import TensorDict
    from verl.utils import attention_utils
    from verl.workers.utils import padding

    try:
        from verl.utils import npu_flash_attn_utils as torch_only
    except ImportError:  # 0.9: it asks by itself
        pass
    else:
        names = "index_first_axis", "pad_input", "rearrange", "unpad_input"
        functions = [getattr(torch_only, name) for name in names]
        attention_utils._get_attention_functions = lambda: functions
    four = torch.arange(4)[None]
    rows = torch.tensor([[[[3, 4]], [[5, 255]], [[-1, -1]], [[-1, -1]]]], dtype=torch.int16)
    batch = TensorDict({
        "input_ids": four, "position_ids": four, "attention_mask": torch.ones_like(four),
        "response_mask": torch.ones(1, 2), "routed_experts": rows}, batch_size=[1])
    found = padding.left_right_2_no_padding(batch)["routed_experts"]
    return (found.values() if found.is_nested else found[0])[:, 0].tolist()

def environment():
    return main_ppo.get_ppo_ray_runtime_env()["env_vars"].get("REPLAY_PATCH_LOG")

def everything():
    out = {name: run(*case) for name, case in LOOPS.items()}
    out["replay off"] = run(ONE, [[Answer("one", "none")]], replay=False)
    others = [[Answer("one", "none")], [Answer("two")], [Answer("three", "new")]]
    out["validation"] = run(ONE, others, validate=True)
    out["a user's worker"] = of_a_user()
    if hasattr(agent_loop, "_get_rollout_and_model_config"):  # 0.7.1
        for replay in (False, True):
            out[f"config without actor_rollout_ref, {replay}"] = run(
                ONE, [[Answer("one")]], replay=replay, flat=True)
    out["limits"] = limits()
    out["environment"] = environment()
    out["unpadded"] = unpadded()
    if resuming_client() is not None:
        for name, answers in RESUMED.items():
            out[name] = run(ONE, answers, resuming=True)
    return out

import functools
import os
os.environ["REPLAY_PATCH_LOG"] = "ERROR"
answers = {"without": everything()}
import replay_patch
replay_patch.activate()
answers["with"] = everything()
answers["patches"] = {p.name: p.state for p in replay_patch.status().patches
                      if p.name.startswith("verl_")}
replay_patch.deactivate()
answers["off again"] = {name: run(*LOOPS[name]) for name in ("single turn", "no routes")}
def example(arguments):
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf
    from verl.utils.config import validate_config

    path = Path(main_ppo.__file__).parent / "config"
    [named] = [each for each in arguments if each.startswith("--config-name=")]
    overrides = [each for each in arguments if not each.startswith("--")]
    with initialize_config_dir(str(path), version_base=None):
        made = compose(named.partition("=")[2], overrides=overrides)
    actor = made.actor_rollout_ref.actor
    return {
        "modes": [place.router_replay.mode for place in (actor, actor.megatron)
                  if place.get("router_replay") is not None],
        "rollout": made.actor_rollout_ref.rollout.enable_rollout_routing_replay,
        "packed": [place.use_remove_padding
                   for place in (actor.megatron, made.actor_rollout_ref.model)],
        "bypass": made.algorithm.rollout_correction.bypass_mode,
        "environment": OmegaConf.to_container(made.ray_kwargs.ray_init.runtime_env.env_vars),
    }

answers["example"] = {mode: example(arguments) for mode, arguments in EXAMPLE.items()}
print(json.dumps(answers))
"""


EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "verl_router_replay.sh"


def example_arguments(verl: str) -> dict[str, list[str]]:
    """What the example gives to verl's main, for R2 and R3."""
    show = 'python3() { shift 2; printf \'%s\\n\' "$@"; }; exec() { "$@"; }; source "$0"'
    shown = {}
    for mode in ("R2", "R3"):
        command = ["bash", "-c", show, str(EXAMPLE), mode, "a-model", "train", "test"]
        env = {**os.environ, "VERL": verl}
        done = subprocess.run(command, env=env, text=True, capture_output=True, check=True)
        shown[mode] = done.stdout.splitlines()
    return shown


@functools.cache
def ask(verl: str) -> Any:
    script = SCRIPT.replace("async_vllm_server", "vllm_async_server")
    with tempfile.TemporaryDirectory() as folder:
        script = f"FOLDER = {folder!r}\nEXAMPLE = {example_arguments(verl)!r}\n{SCRIPT}"
        return trainers.run(script, "0.16.1", {"verl": verl, **RELEASES[verl]}, plugin=False)


def expected_limit(prompt: int, given: int | None, spare: int) -> int:
    """Of a prompt of 10, a response of 20 and a context of 40 tokens."""
    wanted = min(20, 30 - prompt) if given is None else given
    return min(max(1, wanted), 40 - prompt - spare)


@pytest.fixture(params=RELEASES)
def answers(request: pytest.FixtureRequest) -> Any:
    return ask(request.param) | {"verl": request.param}


# --- what the patches are for -----------------------------------------------------------------


def test_without_the_plugin_tool_loops_lose_or_refuse_routes() -> None:
    assert ask("0.7.0")["without"]["tools"] == "absent"
    assert "must match the existing size" in ask("0.7.1")["without"]["truncated tools"]


def test_without_the_plugin_a_sample_without_routes_is_found_late_or_never(answers: Any) -> None:
    found = answers["without"]

    assert found["no routes"].startswith("TypeError")  # torch.cat
    assert found["first has none"] == "absent"  # of the whole batch, silently


def test_without_the_plugin_rows_are_put_at_wrong_tokens(answers: Any) -> None:
    """Nine rows for the nine generated tokens are put at the first nine of the prompt."""
    assert answers["without"]["new rows only"] == [[30, 0, 0, 9]]
    assert answers["without"]["in a thread, new rows only"] == [[17, 0, 0, 9]]


def test_without_the_plugin_resumed_generations_fail_or_shift_their_rows() -> None:
    assert "got numpy.ndarray" in ask("0.8.0")["without"]["resumed"]
    # 32 tokens have a row in some call; 23 are right, and 9 have another token's.
    assert ask("0.9.1")["without"]["a part without"] == [[33, 23, 0, 32]]


def test_without_the_plugin_a_response_grows_or_has_no_token() -> None:
    assert ask("0.7.0")["without"]["limits"]["vllm"][0] == 29  # of 20
    assert ask("0.7.1")["without"]["limits"]["vllm"][3] == 0
    assert ask("0.9.1")["without"]["limits"]["sglang"][3] == 0


@pytest.mark.parametrize("verl", ["0.7.1", "0.8.0"])
def test_without_the_plugin_a_token_without_a_row_gets_expert_255(verl: str) -> None:
    assert ask(verl)["without"]["unpadded"][2:] == [[255, 255]] * 2


# --- with the plugin --------------------------------------------------------------------------

LOOPS = (
    "single turn",
    "truncated",
    "tools",
    "truncated tools",
    "last turn without",
    "a turn without",
    "in a thread",
    "as tokenizers return prompts",
)
RESUMED = (
    "resumed",
    "a part without",
    "the last without",
    "resumed and cut",
    "resumed after filling",
)


@pytest.mark.parametrize("loop", LOOPS + RESUMED)
def test_each_token_has_its_own_row_or_none(answers: Any, loop: str) -> None:
    if loop in RESUMED and answers["verl"] not in RESUMING:
        pytest.skip(f"verl {answers['verl']} has no client that resumes")

    for tokens, right, without, captured in answers["with"][loop]:
        assert (right, without) == (captured, tokens - captured)
        assert captured > 0


def test_a_token_without_a_row_has_none_in_a_packed_batch_either(answers: Any) -> None:
    assert answers["with"]["unpadded"] == [[3, 4], [5, 255], [-1, -1], [-1, -1]]


@pytest.mark.parametrize("loop, sample", [("no routes", 1), ("first has none", 0)])
def test_a_sample_without_routes_is_one_error_that_names_it(
    answers: Any, loop: str, sample: int
) -> None:
    error = answers["with"][loop]

    assert error.startswith(
        f"RouteError: verl: step 3, sample_index {sample}, rollout_n 0: no token"
    )


def test_rows_that_are_not_of_all_tokens_are_refused(answers: Any) -> None:
    found = answers["with"]

    assert "9 rows of routed_experts for 21 prompt and 9 gen" in found["new rows only"]
    assert "returns 9 rows of routed_experts for 17 tokens" in found["in a thread, new rows only"]


def test_nothing_is_asked_of_a_rollout_without_replay_or_of_validation(answers: Any) -> None:
    assert answers["with"]["replay off"] == "absent"
    assert answers["with"]["validation"] == "absent"


def test_a_configuration_without_actor_rollout_ref_is_right_too() -> None:
    """0.7.1 takes one, with replay or without."""
    without, found = (ask("0.7.1")[way] for way in ("without", "with"))
    off, on = (f"config without actor_rollout_ref, {replay}" for replay in (False, True))

    assert found[off] == without[off] == [[24, 23, 0, 23]]
    assert found[on] == [[24, 23, 1, 23]]


def test_outputs_of_a_users_worker_and_loop_have_a_row_for_each_token(answers: Any) -> None:
    """Two outputs of one loop, which hands on no routes itself."""
    assert answers["with"]["a user's worker"] == [[11, 11], [16, 16]]


@pytest.mark.parametrize("server, spare", [("vllm", 0), ("sglang", 1)])
def test_a_response_has_one_to_response_length_tokens(
    answers: Any, server: str, spare: int
) -> None:
    asks = [
        (1, None),
        (10, None),
        (25, None),
        (30, None),
        (38, None),
        (5, 3),
        (5, 33),
        (5, 500),
        (5, 0),
    ]
    expected = [expected_limit(prompt, given, spare) for prompt, given in asks]

    assert answers["with"]["limits"][server] == expected


def test_a_prompt_is_counted_in_any_form_that_the_server_takes(answers: Any) -> None:
    if answers["verl"] == "0.7.0":
        pytest.skip("verl 0.7.0's server takes lists only")

    assert answers["with"]["limits"]["forms"] == [5, 5]


def test_patches_are_in_place_where_the_release_needs_them(answers: Any) -> None:
    needed = {
        "0.7.0": ("verl_max_tokens",),
        "0.7.1": ("verl_max_tokens", "verl_uncaptured_rows"),
        "0.8.0": ("verl_resumed_routes", "verl_uncaptured_rows"),
        "0.9.1": ("verl_resumed_routes",),
    }
    always = ("verl_rollout_routes", "verl_max_tokens_sglang")
    rollout = [*always, "verl_max_tokens", "verl_resumed_routes", "verl_uncaptured_rows"]

    for name in rollout:
        expected = name in always + needed[answers["verl"]]
        assert answers["patches"][name] == ("active" if expected else "not needed"), name


def test_workers_get_the_drivers_variables(answers: Any) -> None:
    assert [answers[way]["environment"] for way in ("without", "with")] == [None, "ERROR"]


def test_the_example_configures_both_modes(answers: Any) -> None:
    for mode, found in answers["example"].items():
        assert mode in found.pop("modes")
        assert found == {
            "rollout": mode == "R3",
            "packed": [True, True],
            "bypass": False,
            "environment": {"REPLAY_PATCH": "1"},
        }


def test_after_deactivation_verl_is_as_it_was(answers: Any) -> None:
    for loop, found in answers["off again"].items():
        assert found == answers["without"][loop]
