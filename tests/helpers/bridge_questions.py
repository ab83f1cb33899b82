"""What the tests of Megatron-Bridge and mbridge ask, in a process of their own.

Import it first: it installs the CPU bed. Every routing map is compared with ids that a generator
drew, or with the map that a hook saw before the weights were changed; never with what replay says.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from replay_patch.matrix import cpu
from replay_patch.megatron import no_triton

cpu.install()
no_triton.provide("megatron.core.inference.contexts.attention_context.triton")
import megatron.core  # noqa: E402, F401

cpu.patch_megatron()

import torch  # noqa: E402
from megatron.core.transformer.moe.router import TopKRouter  # noqa: E402
from torch import Tensor  # noqa: E402

from replay_patch.matrix import tiny  # noqa: E402

NAMES = ("enable_routing_replay", "moe_enable_routing_replay", "moe_router_fusion")
E, K, B, S, VOCAB = 4, 2, 2, 6, 64
LENGTHS = [S, S - 2]

MOE = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": E,
    "num_experts_per_tok": K,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
"""Of a Hugging Face config."""


def init() -> None:
    """Process groups and Megatron's random states."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    tiny.init()
    torch.manual_seed(7)
    model_parallel_cuda_manual_seed(7)


def qwen3_moe() -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(**MOE, architectures=["Qwen3MoeForCausalLM"], rope_theta=10000.0)


def error(call: Callable[[], Any]) -> str:
    """The type and text of what it raises, in one line; "" if it returns."""
    try:
        call()
    except Exception as raised:
        return f"{type(raised).__name__}: {' '.join(str(raised).split())}"
    return ""


def routers(model: Any) -> list[Any]:
    """Those that the model runs."""
    return [module for module in model.modules() if isinstance(module, TopKRouter)]


@contextlib.contextmanager
def noted(model: Any) -> Iterator[list[Tensor]]:
    """Collect the routing maps, in the order of the calls."""
    maps: list[Tensor] = []
    hooks = [
        router.register_forward_hook(lambda module, args, out: maps.append(out[1].detach()))
        for router in routers(model)
    ]
    try:
        yield maps
    finally:
        for hook in hooks:
            hook.remove()


def maps_of(model: Any, **more: Any) -> list[Tensor]:
    """The routing maps of one forward."""
    with noted(model) as maps:
        model(*inputs(), **more)
    return maps


def inputs() -> tuple[Tensor, Tensor, None]:
    """Tokens, positions and no mask of a microbatch."""
    tokens = torch.randint(0, VOCAB - 8, (B, S), generator=torch.Generator().manual_seed(3))
    return tokens, torch.arange(S).expand(B, S), None


def other_ids(seed: int) -> Tensor:
    scores = torch.rand(B * S, E, generator=torch.Generator().manual_seed(seed))
    return scores.argsort(1)[:, :K].contiguous()


def as_map(ids: Tensor) -> Tensor:
    return torch.zeros(len(ids), E, dtype=torch.bool).scatter(1, ids, True)


def equal(left: list[Tensor], right: list[Tensor]) -> list[bool]:
    return [torch.equal(*pair) for pair in zip(left, right, strict=True)]


def perturb(model: Any) -> None:
    """Change the routers, so that native routes differ."""
    with torch.no_grad():
        for router in routers(model):
            router.weight.copy_(-router.weight)


def low_level(model: Any) -> dict[str, Any]:
    """Megatron 0.19's API by position, as trainers use it: maps are those of the given ids."""
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    listed = RouterReplay.global_router_replay_instances
    live = [router.router_replay for router in routers(model)]
    out: dict[str, Any] = {"listed": [entry in live for entry in listed]}
    given = [other_ids(seed) for seed in range(len(live))]
    RouterReplay.set_replay_data(given)
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    out["by position"] = equal(maps_of(model), [as_map(ids) for ids in given])
    RouterReplay.clear_global_router_replay_action()
    RouterReplay.clear_global_indices()
    return out


def sessions(model: Any) -> dict[str, Any]:
    """recording() and replaying() with the model as it was given, wrapped or in a list."""
    import replay_patch
    from replay_patch import TokenLayout

    [chunk] = model if isinstance(model, list) else [model]
    layout = TokenLayout.padded(LENGTHS, S)
    with replay_patch.recording(model) as record:
        recorded = maps_of(chunk, **record.load(chunk, layout))
    routes = record.routes()
    perturb(chunk)
    native = maps_of(chunk)
    with replay_patch.replaying(model) as replay:
        replayed = maps_of(chunk, **replay.load(chunk, routes, layout))
    # Padding is native in the first, and spread evenly in the last.
    real = torch.tensor([s < LENGTHS[b] for s in range(S) for b in range(B)])
    recorded, native, replayed = ([m[real] for m in maps] for maps in (recorded, native, replayed))
    return {
        "wrapped in": wrappers(chunk),
        "changed": [not same for same in equal(recorded, native)],
        "in sessions": equal(recorded, replayed),
        "report": [replay.report.replayed, replay.report.holes],
    }


def wrappers(chunk: Any) -> list[str]:
    """The names of the classes around and of the model, outermost first."""
    names = [type(chunk).__name__]
    while not hasattr(chunk, "decoder") and hasattr(chunk, "module"):
        chunk = chunk.module
        names.append(type(chunk).__name__)
    return names
