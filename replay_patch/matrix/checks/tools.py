"""What the checks share: inputs, maps and comparisons. T tokens, E experts, K top-k."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from replay_patch.errors import ReplayPatchError
from replay_patch.matrix import tiny
from replay_patch.matrix.ranks import launch
from replay_patch.matrix.registry import Skip

EXPERTS, TOPK, SEQUENCE, BATCH, HIDDEN = 6, 2, 8, 2, 16
TOKENS = SEQUENCE * BATCH
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
"""Config fields of a full recompute."""


def config(*, replay: bool = True, **options: Any) -> Any:
    """The config of a model without auxiliary loss; `replay=False` does not even mention replay."""
    defaults = {
        **({"enable_routing_replay": True} if replay else {}),
        "num_layers": 4,
        "num_moe_experts": EXPERTS,
        "moe_router_topk": TOPK,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }
    return tiny.moe_config(**defaults | options)


def staged_config(layers: int, pp: int, vpp: int | None, **options: Any) -> Any:
    """The config for `pp` pipeline ranks of `vpp` virtual stages each; None: without them."""
    return tiny.moe_config(
        num_layers=layers,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        **(tiny.VPP_P2P if vpp else {}),
        **options,
    )


def routers(model: Any) -> list[Any]:
    """The routers of a model, in order."""
    from megatron.core.transformer.moe.router import TopKRouter

    return [module for module in model.modules() if isinstance(module, TopKRouter)]


def hidden_states(seed: int = 1) -> Any:
    """float32 [SEQUENCE, BATCH, HIDDEN], with a gradient."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SEQUENCE, BATCH, HIDDEN, generator=generator, requires_grad=True)


def some_ids(seed: int = 0, rows: int = TOKENS, topk: int = TOPK) -> Any:
    """int64 [rows, topk]: any experts, different ones in a row, in any order."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.rand(rows, EXPERTS, generator=generator).argsort(1)[:, :topk].contiguous()


def as_map(ids: Any) -> Any:
    """bool [T, E] of ids [T, K]."""
    import torch

    return torch.zeros(len(ids), EXPERTS, dtype=torch.bool).scatter(1, ids.long(), True)


def native_topk(scores: Any, topk: int, *_: Any, **__: Any) -> Any:
    """(values, ids) of the selection that every release makes without groups."""
    import torch

    return torch.topk(scores, topk, dim=1)


def topk_function() -> Any:
    """The function by which this release's router turns logits into (probs, map, ...)."""
    from megatron.core.transformer.moe import router

    old = getattr(router, "topk_softmax_with_capacity", None)  # 0.12, 0.13
    return old or router.topk_routing_with_score_function


def provide_fused_kernel() -> list[str]:
    """Stand in for Transformer Engine's fused kernel by one that takes experts 0 .. K-1; returns a
    list that gets one word for each of its calls."""
    import torch
    from megatron.core.transformer.moe import moe_utils

    calls: list[str] = []

    def kernel(logits: Any, topk: int, **_: Any) -> Any:
        calls.append("fused")
        routing_map = as_map(torch.arange(topk).repeat(len(logits), 1))
        return routing_map / topk, routing_map

    moe_utils.HAVE_TE = True
    moe_utils.fused_topk_with_score_function = kernel
    return calls


def mean_loss(losses: Any) -> tuple[Any, dict[str, Any]]:
    """The loss function that a `forward_step` returns."""
    loss = losses.float().mean()
    return loss, {"loss": loss.detach()}


def on_ranks(rank: Callable[..., None], **options: Any) -> None:
    """Run `rank(rank, world, init_file, options)` on two ranks; `options` are config fields."""
    launch(rank, 2, (options,))


def group_sizes(options: dict[str, Any]) -> dict[str, Any]:
    """The config fields that process groups are made with, too."""
    return {name: size for name, size in options.items() if name.endswith("parallel_size")}


def run_schedule(
    forward_step: Callable[..., Any],
    chunks: list[Any],
    microbatches: int,
    *,
    length: int = SEQUENCE,
    forward_only: bool = False,
) -> None:
    """Megatron's own schedule; `forward_step` gets an iterator of microbatch numbers."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    several = len(chunks) > 1
    iterators = [iter(range(microbatches)) for _ in chunks]
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if several else iterators[0],
        model=chunks if several else chunks[0],
        num_microbatches=microbatches,
        seq_length=length,
        micro_batch_size=BATCH,
        forward_only=forward_only,
    )


@contextlib.contextmanager
def refused(
    what: str, error: type[Exception] = ReplayPatchError, named: str = ""
) -> Iterator[None]:
    """AssertionError unless the block raises the error, with a message that has `named` in it."""
    try:
        yield
    except error as raised:
        message = str(raised)
    else:
        raise AssertionError(f"{what} is accepted; expected a {error.__name__}")
    assert named in message, f"{what} is refused without saying {named!r}: {message}"


@contextlib.contextmanager
def mindspeed_may_fail(words: str) -> Iterator[None]:
    """Skip if MindSpeed itself cannot do it, alone or with this Megatron: its error has `words`."""
    try:
        yield
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if words in line]
        if "mindspeed" not in sys.modules or not lines:
            raise
        raise Skip(f"this MindSpeed cannot do it: {lines[0]}") from error


def same_map(expected: Any, found: Any, where: str) -> None:
    """AssertionError, with the first row that differs, unless two maps [T, E] are equal."""
    wrong = (expected.bool() != found.bool()).any(1).nonzero().flatten().tolist()
    assert not wrong, (
        f"{where}: {len(wrong)} of {len(expected)} tokens go to other experts; token {wrong[0]} to "
        f"{found[wrong[0]].nonzero().flatten().tolist()}, expected "
        f"{expected[wrong[0]].nonzero().flatten().tolist()}"
    )


def same_bits(expected: Any, found: Any, what: str) -> None:
    """AssertionError, with the largest difference, unless two tensors are bitwise equal."""
    import torch

    difference = float((expected.double() - found.double()).abs().max())
    assert torch.equal(expected, found), f"{what} differs by up to {difference:.3g}"


def all_same_bits(expected: dict[str, Any], found: dict[str, Any], what: str) -> None:
    """`same_bits` of each of the expected tensors, which is called `what` and its name."""
    for name, tensor in expected.items():
        same_bits(tensor, found[name], f"{what}{name}")
