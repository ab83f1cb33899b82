"""verl's Megatron engine on CPU and gloo: a tiny Qwen3-MoE in verl's own workers, with its batches.

What is not verl's own, and why:

* the device: verl 0.9 has a registry of platforms, where a CPU is added; before, it finds one
  itself. Its Megatron engine is registered for the CPU as well. `torch.cpu` has no memory
  statistics.
* packing and unpacking of padded batches is flash-attn's before 0.9, else what verl has for NPUs.
* mbridge builds layers of Transformer Engine and loads a checkpoint: here the local layers of
  Megatron, with an attention that takes packed sequences, and weights drawn from a seed. It
  compares a ModelType with a member that Megatron 0.19 no longer has.
* before 0.7.1, verl imports a class by the name that transformers 4 had for it.
"""

import functools
import itertools
import os
import tempfile
import types
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from helpers import peer_packages, trainers

from replay_patch.matrix.environments import environment

EXPERTS, TOPK, LAYERS, VOCAB = 8, 2, 2, 64


MBRIDGE = "0.15.1"
QUESTIONS = ("names", "masked_rows", "helpers_of_a_stage", "r2", "r3", "r3_beside_another")
MORE = (
    "waits_for_the_device",
    "r2_with_a_decoder_built_twice",
    "after_an_exception",
    "r2_without_recording",
    "r2_with_many_experts",
    "settings",
)
IN_THE_ENGINE = ("r2_padded", "r2_with_the_rollouts", "one_expert")  # 0.7.0 has the actor only
IN_DEPTH, OF_0_7_0 = "0.16.1", "0.14.0"
"""The Megatron on which all questions are asked; without the plugin verl 0.7.0 fails on it: it does
not take the padding_mask."""


def ask(verl: str, megatron: str, plugin: bool = True) -> Any:
    """The answers of `helpers.verl_questions`, from a process with these releases."""
    return _asked(verl, megatron, plugin)


@functools.cache  # by one form of the arguments: the two test files share cells
def _asked(verl: str, megatron: str, plugin: bool) -> Any:
    questions = QUESTIONS if plugin else ("without_the_plugin",)
    if megatron == (IN_DEPTH if plugin or verl != "0.7.0" else OF_0_7_0):
        questions += () if plugin else ("r3", "r3_beside_another")
        questions += MORE + (IN_THE_ENGINE if verl != "0.7.0" else ())
    code = f"from helpers import verl_questions; verl_questions.answer(*{questions!r})"
    return trainers.run(
        code,
        megatron,
        {"verl": verl, "mbridge": MBRIDGE},
        plugin=plugin,
        # mbridge imports Megatron's layers of Transformer Engine, which 0.12 does not guard.
        transformer_engine=megatron.startswith("0.12."),
    )


@contextmanager
def started(cells: Sequence[tuple[Any, ...]]) -> Iterator[Callable[..., Any]]:
    """`ask`, of these arguments, begun for all of them: two processes at a time."""
    for verl, megatron, *_ in cells:  # one after the other: they share a folder
        peer_packages.folder("verl", verl)
        environment(megatron)
    peer_packages.folder("mbridge", MBRIDGE)
    trainers.dependencies()
    with ThreadPoolExecutor(2) as pool:
        answers = {cell: pool.submit(ask, *cell) for cell in cells}
        yield lambda *cell: answers[cell].result()
        pool.shutdown(cancel_futures=True)


def install() -> None:
    """The CPU bed, Megatron's groups for one process (of several ranks verl makes them), and verl
    ready to be imported."""
    from replay_patch.matrix import cpu, tiny

    os.environ |= {"LOCAL_RANK": "0", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    cpu.install()
    import megatron.core  # noqa: F401
    import torch

    cpu.patch_megatron()
    if os.environ.get("WORLD_SIZE", "1") == "1":
        tiny.init()
    else:
        torch.distributed.init_process_group("gloo")
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.setdefault(name, {"WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}.get(name, "0"))

    for module in (torch.cpu, torch.cuda):
        for name in ("memory_allocated", "memory_reserved"):
            setattr(module, name, lambda *device: 0)
            setattr(module, f"max_{name}", lambda *device: 0)
        module.mem_get_info = lambda *device: (0, 1)
        module.empty_cache = lambda: None
        module.get_device_name = lambda *device: "CPU"
    _platform()
    _padding()
    _bridge()
    _older_transformers()


def _older_transformers() -> None:
    import transformers

    if not hasattr(transformers, "AutoModelForVision2Seq"):
        transformers.AutoModelForVision2Seq = transformers.AutoModelForImageTextToText


def _platform() -> None:
    try:
        from verl.plugin import platform
    except ImportError:
        return
    from verl.plugin.platform.platform_cuda import PlatformCUDA

    class Cpu(PlatformCUDA):
        device_name = "cpu"

        def is_available(self) -> bool:
            return True

        def current_device(self) -> str:
            return "cpu"

    platform.set_platform(Cpu())


def _padding() -> None:
    from verl.utils import attention_utils

    try:
        from verl.utils import npu_flash_attn_utils as torch_only
    except ImportError:  # 0.9: it asks by itself
        return
    names = ("index_first_axis", "pad_input", "rearrange", "unpad_input")
    functions = tuple(getattr(torch_only, name) for name in names)
    attention_utils._get_attention_functions = lambda: functions


def _bridge() -> None:
    import torch
    from mbridge.core import bridge, llm_bridge, util

    from replay_patch.matrix.attention import with_torch_attention
    from replay_patch.patching.rebinding import Instead

    make = llm_bridge.get_gpt_decoder_block_spec

    def local_spec(config: Any, use_transformer_engine: bool, **options: Any) -> Any:
        spec = make(config, use_transformer_engine=False, **options)
        spec.layer_specs = [with_torch_attention(layer) for layer in spec.layer_specs]
        return spec

    def load_weights(self: Any, models: Any, path: str, memory_efficient: bool = False) -> None:
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for model in models:
                for name, value in model.named_parameters():
                    if value.dim() > 1:
                        scale = 1.0 if "router" in name or "embedding" in name else 0.2
                        value.copy_(torch.randn(value.shape, generator=generator) * scale)

    llm_bridge.get_gpt_decoder_block_spec = local_spec
    if not hasattr(util.ModelType, "encoder_and_decoder"):
        util.ModelType = Instead(util.ModelType, encoder_and_decoder=None)
    bridge.Bridge.load_weights = load_weights


def model_folder(**over: Any) -> str:
    """A folder with the config of a tiny Qwen3-MoE, and nothing else."""
    from transformers import Qwen3MoeConfig

    folder = tempfile.mkdtemp()
    values: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 32,
        "moe_intermediate_size": 16,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOPK,
        "max_position_embeddings": 128,
        "architectures": ["Qwen3MoeForCausalLM"],
    }
    Qwen3MoeConfig(**values | over).save_pretrained(folder)
    return folder


def worker(mode: str = "disabled", *, forward_only: bool = False, **over: Any) -> Any:
    """verl's TrainingWorker with its Megatron engine; `over`: of the model's config, or what
    `override` says of Megatron's, or `parallel` of its sizes."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers import engine_workers
    from verl.workers.config import (
        HFModelConfig,
        McoreEngineConfig,
        McoreOptimizerConfig,
        TrainingWorkerConfig,
    )
    from verl.workers.engine import EngineRegistry

    replay = {}
    if mode != "disabled":  # 0.7.0 has no such field
        from verl.workers.config.engine import EngineRouterReplayConfig

        replay = {"router_replay": EngineRouterReplayConfig(mode=mode)}
    override = {
        "moe_grouped_gemm": False,  # local layers have none without grouped_gemm
        "use_cpu_initialization": True,
        "persist_layer_norm": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
    } | over.pop("override", {})
    parallel = over.pop("parallel", {})
    model = HFModelConfig(
        path=model_folder(**over),
        load_tokenizer=False,
        override_config={"attn_implementation": "eager"},
    )
    if not hasattr(model.hf_config, "rope_theta"):  # where transformers 4 had it
        model.hf_config.rope_theta = 1e6
    model.tokenizer = types.SimpleNamespace(pad_token_id=0)  # all that the engine asks of it
    engine = McoreEngineConfig(
        use_mbridge=True,
        vanilla_mbridge=True,
        forward_only=forward_only,
        use_distributed_optimizer=False,
        override_transformer_config=override,
        **replay,
        **parallel,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=2,
        infer_micro_batch_size_per_gpu=2,
    )
    config = TrainingWorkerConfig(
        model_type="language_model",
        model_config=model,
        engine_config=engine,
        optimizer_config=McoreOptimizerConfig(lr=0.0, lr_decay_steps=1, lr_warmup_steps=0),
        checkpoint_config=CheckpointConfig(),
    )
    engines = EngineRegistry._engines["language_model"]["megatron"]
    engines.setdefault("cpu", engines["cuda"])
    made = engine_workers.TrainingWorker(config=config)
    made.reset()
    made.set_loss_fn(_loss)
    return made


def _loss(model_output: Any, data: Any, dp_group: Any = None) -> Any:
    return -model_output["log_probs"].values().float().mean(), {}


# --- batches and passes, as verl's trainer makes them ------------------------------------------

PROMPTS, RESPONSES = (5, 3, 4, 1), (3, 6, 1, 4)  # real tokens; padded to the left and to the right


def batch(routes: Any = None, **tensors: Any) -> Any:
    """A DataProto of four trajectories; no token is in two of them at the same place."""
    import torch
    from verl import DataProto

    before, after = max(PROMPTS), max(RESPONSES)
    ids = torch.zeros(len(PROMPTS), before + after, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        real = slice(before - prompt, before + response)
        ids[row, real] = (torch.arange(prompt + response) * 7 + 13 * row) % (VOCAB - 1) + 1
        mask[row, real] = 1
    tensors |= {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        "prompts": ids[:, :before],
        "responses": ids[:, before:],
        "response_mask": mask[:, before:],
    }
    if routes is not None:
        tensors["routed_experts"] = routes
    return DataProto.from_single_dict(tensors, meta_info={"temperature": 1.0})


def real_rows(padded: Any) -> list[Any]:
    """[B, S, ...] -> for each trajectory its real rows."""
    before = max(PROMPTS)
    both = zip(PROMPTS, RESPONSES, strict=True)
    return [rows[before - p : before + r] for rows, (p, r) in zip(padded, both, strict=True)]


def _of_any_rank(found: Any) -> Any:
    """What one rank returns, as the driver hands it to all."""
    import torch.distributed as dist

    every = [found] * dist.get_world_size()
    if len(every) > 1:
        dist.all_gather_object(every, found)
    return next((one for one in every if one is not None), None)


class Engine:
    """verl's engine in its worker (0.7.1 on), with the passes of RayPPOTrainer."""

    def __init__(self, mode: str = "disabled", **options: Any) -> None:
        self.worker = worker(mode, **options)
        self.module = self.worker.engine.module

    def log_probs(self, data: Any, replay: bool = True) -> Any:
        """The old-log-prob pass (`_compute_old_log_prob`): the batch with what it recorded."""
        from verl import DataProto
        from verl.utils import tensordict_utils as tu

        options = {"calculate_entropy": True, "compute_loss": False}
        output = self.worker.infer_batch(self._batch(data, replay, options))
        recorded = _of_any_rank(None if output is None else tu.get(output, "routed_experts"))
        if recorded is None:
            return data
        return data.union(
            DataProto.from_tensordict(tu.get_tensordict({"routed_experts": recorded}))
        )

    def update(self, data: Any, replay: bool = True, mini_batch_size: int = 4) -> None:
        """The update of the actor (`_update_actor`)."""
        options = {"calculate_entropy": False, "global_batch_size": mini_batch_size, "epochs": 1}
        options |= {"mini_batch_size": mini_batch_size, "seed": 1, "compute_loss": True}
        options |= {"dataloader_kwargs": {"shuffle": True}}
        self.worker.train_mini_batch(self._batch(data, replay, options))

    def _batch(self, data: Any, replay: bool, options: dict[str, Any]) -> Any:
        from verl.utils import tensordict_utils as tu
        from verl.workers.utils.padding import left_right_2_no_padding

        made = left_right_2_no_padding(data.to_tensordict())
        tu.assign_non_tensor(made, **options)
        tu.assign_non_tensor_data(made, "enable_routing_replay", replay)
        return made


class Actor:
    """The actor beside the engine (0.7): MegatronPPOActor, and what its worker does around it."""

    def __init__(self, mode: str, override: dict[str, Any] | None = None, **options: Any) -> None:
        from verl.utils.megatron import router_replay_patch
        from verl.workers import megatron_workers
        from verl.workers.actor.megatron_actor import MegatronPPOActor
        from verl.workers.config import McoreActorConfig, McoreEngineConfig, McoreOptimizerConfig
        from verl.workers.config.actor import RouterReplayConfig

        router_replay_patch.apply_router_replay_patch()
        self.engine = Engine(
            override={**(override or {}), "enable_routing_replay": True}, **options
        )
        self.module = self.engine.module
        config = McoreActorConfig(
            strategy="megatron",
            rollout_n=1,
            ppo_mini_batch_size=2,
            ppo_micro_batch_size_per_gpu=1,
            use_dynamic_bsz=False,
            entropy_coeff=0.0,
            data_loader_seed=1,
            shuffle=True,
            router_replay=RouterReplayConfig(mode=mode),
            megatron=McoreEngineConfig(use_remove_padding=True),
            optim=McoreOptimizerConfig(lr=0.0),
        )
        engine = self.engine.worker.engine
        self.actor = MegatronPPOActor(
            config=config,
            model_config=None,
            hf_config=engine.model_config.hf_config,
            tf_config=engine.tf_config,
            actor_module=engine.module,
            actor_optimizer=engine.optimizer,
        )
        rollout = types.SimpleNamespace(
            log_prob_micro_batch_size_per_gpu=2,
            log_prob_max_token_len_per_gpu=None,
            log_prob_use_dynamic_bsz=False,
            temperature=1.0,
        )
        self.worker = types.SimpleNamespace(
            _is_actor=True,
            _is_offload_param=False,
            enable_routing_replay=True,
            config=types.SimpleNamespace(actor=config, rollout=rollout),
            actor=self.actor,
        )
        self.pass_of_worker = megatron_workers.ActorRolloutRefWorker.compute_log_prob

    def log_probs(self, data: Any, replay: bool = True) -> Any:
        if not replay:
            return self.engine.log_probs(data, replay=False)
        output = self.pass_of_worker(self.worker, data)
        wanted = [key for key in ("routed_experts",) if key in output.batch]
        return data.union(output.select(batch_keys=wanted)) if wanted else data

    def update(self, data: Any, replay: bool = True, mini_batch_size: int = 2) -> None:
        import torch

        zeros = torch.zeros(len(PROMPTS), max(RESPONSES))
        for name in ("old_log_probs", "advantages"):
            data.batch[name] = zeros
        for chunk in self.module:
            chunk.train()  # the worker's trainer_mode
        self.actor.update_policy(self.actor.make_minibatch_iterator(data))


# --- what the routers really did ---------------------------------------------------------------


@contextmanager
def watched(made: Any) -> Iterator[Callable[[], list[Any]]]:
    """Routing maps of all router calls of this engine's model while in the block.

    Yields a function: for each trajectory and layer the bool maps [its tokens, experts], one for
    each call (forward, and recompute). Independent of all replay code: the trajectory is known by
    its tokens in the model's input.
    """
    from megatron.core.transformer.moe.router import TopKRouter
    from verl.utils.megatron_utils import unwrap_model

    [model] = unwrap_model(made.module)
    owners = [row.tolist() for row in real_rows(batch().batch["input_ids"])]
    maps: list[Any] = [[[] for _ in range(LAYERS)] for _ in owners]
    places: list[Any] = []

    def enter(module: Any, args: Any, kwargs: Any) -> None:
        ids, ends = kwargs["input_ids"], kwargs["packed_seq_params"].cu_seqlens_q_padded.tolist()
        begins = [a for a, _ in itertools.pairwise(ends)]
        if ids.is_nested:  # after the first stage
            places[:] = zip([part.tolist() for part in ids.unbind()], begins, strict=True)
        else:
            tokens = ids.flatten().tolist()
            places[:] = [(tokens[a:b], a) for a, b in itertools.pairwise(ends)]

    def leave(router: Any, args: Any, output: Any) -> None:
        whole = _of_all_rows(output[1].detach(), router.config)
        for tokens, start in places:  # with padding behind, if there are several ranks
            [owner] = [i for i, own in enumerate(owners) if tokens[: len(own)] == own]
            rows = whole[start : start + len(owners[owner])]
            maps[owner][router.layer_number - 1].append(rows.clone())

    handles = [model.register_forward_pre_hook(enter, with_kwargs=True)]
    routers = [m for m in model.modules() if isinstance(m, TopKRouter)]
    handles += [router.register_forward_hook(leave) for router in routers]
    try:
        yield lambda: maps
    finally:
        for handle in handles:
            handle.remove()


def _of_all_rows(found: Any, config: Any) -> Any:
    """The rows of all ranks, where sequence parallelism has cut them."""
    import torch

    if not config.sequence_parallel:
        return found
    every = [torch.empty_like(found, dtype=torch.uint8) for _ in range(2)]
    torch.distributed.all_gather(every, found.to(torch.uint8))
    return torch.cat(every).bool()


def perturb(made: Any, seed: int = 3) -> None:
    """Other router weights, so that native choices differ from what was recorded."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in made.module:
            for name, value in module.named_parameters():
                if "router" in name:
                    value.copy_(torch.randn(value.shape, generator=generator))


def other_routes(seed: int = 1) -> Any:
    """int [B, S, L, K] with distinct ids in each row, as a rollout engine captures them."""
    import torch

    shape = len(PROMPTS), max(PROMPTS) + max(RESPONSES), LAYERS, EXPERTS
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=generator).argsort(-1)[..., :TOPK].to(torch.int32)


def map_of(ids: Any) -> Any:
    """[tokens, K] -> bool [tokens, experts]; of a row of -1 it says nothing."""
    import torch

    made = torch.zeros(len(ids), EXPERTS, dtype=torch.bool)
    return made.scatter(1, ids.long().clamp(min=0), True)
