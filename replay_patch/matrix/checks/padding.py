"""Checks of padding masks: padding counts in no loss and no expert bias, wherever a mask enters."""

import inspect
from typing import Any

from replay_patch.errors import LayoutError
from replay_patch.matrix import tiny
from replay_patch.matrix.checks import tools
from replay_patch.matrix.registry import Skip, check

LENGTH = tools.SEQUENCE - 2  # real tokens of each sequence
LAYERS, MICROBATCHES = 2, 2
BIAS = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}


@check("padding-model")
def padding_model() -> None:
    """A model takes `padding_mask`: losses and gradients, auxiliary and z-loss included, are those
    of the batch without its rows of padding, also with full recompute; a mask without padding
    changes nothing."""
    import torch

    tiny.init()
    for kind in ("aux_loss", "seq_aux_loss"):
        expected = _gradients(_model(kind), LENGTH, LENGTH)
        for recompute in ({}, tools.FULL):
            where = f"{kind}, {'with' if recompute else 'without'} recompute"
            _same(expected, _gradients(_model(kind, **recompute), LENGTH, tools.SEQUENCE), where)
        whole = _gradients(_model(kind), tools.SEQUENCE, tools.SEQUENCE, masked=False)
        found = _gradients(_model(kind), tools.SEQUENCE, tools.SEQUENCE)
        _same(whole, found, f"{kind}, a mask without padding")
        unmasked = _gradients(_model(kind), LENGTH, tools.SEQUENCE, masked=False)
        different = any(not torch.allclose(unmasked[n], expected[n]) for n in expected)
        assert different, f"{kind}: padding makes no difference here, so this check says nothing"


@check("padding-bias")
def padding_bias() -> None:
    """From 0.16 on: the counts for the expert bias leave out masked tokens, for masks [tokens] and
    [tokens, 1]; also with as many tokens as experts, and with one token."""
    import torch
    from megatron.core.transformer.moe.router import TopKRouter

    if not hasattr(TopKRouter, "_apply_expert_bias"):
        raise Skip("this release counts for the expert bias in its routing; see padding-counts")
    tiny.init()
    router = tiny.router(tools.config(replay=False, **BIAS))
    for tokens in (1, 2, tools.EXPERTS, tools.TOKENS):
        chosen = tools.as_map(tools.some_ids(rows=tokens))
        for masked in {0, tokens // 2, tokens}:
            mask = torch.arange(tokens) >= tokens - masked
            expected = chosen[~mask].sum(0).tolist()
            for shape in ((tokens,), (tokens, 1)):
                router.local_tokens_per_expert.zero_()
                router._apply_expert_bias(chosen, padding_mask=mask.view(shape))
                found = router.local_tokens_per_expert.tolist()
                where = f"{masked} of {tokens} tokens masked, mask {list(shape)}"
                assert found == expected, f"{where}: counts {found}, expected {expected}"


@check("padding-counts")
def padding_counts() -> None:
    """The counts for the expert bias in a whole model leave out padding, and count once with full
    recompute; without gradients nothing is counted."""
    import torch

    tiny.init()
    expected = _counts(_model("none", **BIAS), LENGTH, LENGTH)
    for recompute in ({}, tools.FULL):
        found = _counts(_model("none", **BIAS, **recompute), LENGTH, tools.SEQUENCE)
        assert found == expected, f"counts {found}, expected {expected}, {recompute or 'plain'}"
    with torch.no_grad():
        found = _counts(_model("none", **BIAS), LENGTH, tools.SEQUENCE, backward=False)
    assert not any(map(any, found)), f"without gradients the counts are {found}"


@check("padding-only")
def padding_only() -> None:
    """From 0.16 on: a router whose tokens are all masked gives no NaN, and no gradient of any
    auxiliary loss."""
    import torch
    from megatron.core.transformer.moe import router as module

    if not hasattr(module, "get_tokens_per_expert_and_token_count"):
        raise Skip("this release's auxiliary losses take no mask; see padding-model")
    tiny.init()
    for kind in ("aux_loss", "seq_aux_loss", "global_aux_loss"):
        router = tiny.router(tools.config(replay=False, **_losses(kind))).train()
        mask = torch.ones(tools.SEQUENCE, tools.BATCH, dtype=torch.bool)
        probs, _ = router(tools.hidden_states(), padding_mask=mask)
        (probs * 0).sum().backward()
        largest = float(router.weight.grad.abs().max())
        assert largest == 0, f"{kind}: padding only gives a gradient of {largest}"


@check("padding-shape")
def padding_shape() -> None:
    """From 0.16 on: an MoE layer takes its part of a mask that is not cut for sequence
    parallelism, leaves one that is alone, and refuses another shape."""
    import torch
    from megatron.core.transformer.moe.moe_layer import MoELayer

    if "padding_mask" not in inspect.signature(MoELayer.forward).parameters:
        raise Skip("this release's MoE layer takes no padding_mask")
    tiny.init()
    layer = tiny.moe_layer(tools.config(replay=False, **_losses("none")))
    layer.config.sequence_parallel, layer.config.tensor_model_parallel_size = True, 2
    seen = []
    layer.router.register_forward_pre_hook(lambda _, args: seen.append(args[1]))
    mask = torch.rand(tools.BATCH, 2 * tools.SEQUENCE) > 0.5
    part = mask[:, : tools.SEQUENCE]
    for given in (mask, part):
        layer(tools.hidden_states(), padding_mask=given)
        found = [list(m.shape) for m in seen]
        assert torch.equal(seen.pop(), part.t()), f"the router's masks have the shapes {found}"
    with tools.refused("a mask that is one position short", LayoutError):
        layer(tools.hidden_states(), padding_mask=mask[:, :-1])


@check("mtp-recompute")
def mtp_recompute() -> None:
    """With multi-token prediction and full recompute a model runs, with a mask where the release
    takes one, and its gradients are those without recompute."""
    from replay_patch.megatron import models

    tiny.init()
    options = {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.1}
    masked = models.takes_mask(_model("aux_loss"))
    _same_with_recompute(tools.FULL, masked, **options)


@check("block-recompute")
def block_recompute() -> None:
    """From 0.16 on: with a recompute of some layers only (`recompute_method="block"`) the others
    have the padding mask, too; gradients are those without recompute."""
    from replay_patch.megatron import models

    tiny.init()
    if not models.takes_mask(_model("none")):
        raise Skip("this release's model takes no padding_mask; see padding-model")
    _same_with_recompute(tools.FULL | {"recompute_method": "block"})


@check("padding-tp-sp", ranks=2)
def padding_tp_sp() -> None:
    """Two tensor-parallel ranks with sequence parallelism, each with other rows of padding: counts
    and gradients of the routers are those of the batch without padding in one process."""
    tools.on_ranks(_rank, tensor_model_parallel_size=2, sequence_parallel=True)


@check("padding-pp", ranks=2)
def padding_pp() -> None:
    """Two pipeline stages: the same, in the routers of both stages."""
    tools.on_ranks(_rank, pipeline_model_parallel_size=2)


def _losses(kind: str) -> dict[str, Any]:
    coefficient = 0.0 if kind == "none" else 0.1
    return {"moe_router_load_balancing_type": kind, "moe_aux_loss_coeff": coefficient}


def _model(kind: str, **options: Any) -> Any:
    tiny.clear_aux_tracker()
    z_loss = {} if kind == "none" else {"moe_z_loss_coeff": 0.1}
    config = tools.config(num_layers=LAYERS, replay=False, **_losses(kind), **z_loss, **options)
    return tiny.gpt_model(config)


def _batch(length: int, total: int, microbatch: int = 0) -> tuple[Any, Any, Any]:
    """(tokens, positions, padding mask), each [BATCH, total]: padding after `length` tokens."""
    import torch

    generator = torch.Generator().manual_seed(microbatch)
    tokens = torch.randint(1, 64, (tools.BATCH, tools.SEQUENCE), generator=generator)[:, :total]
    positions = torch.arange(total).expand(tools.BATCH, total)
    mask = positions >= length
    return tokens.masked_fill(mask, 0), positions, mask


def _backward(model: Any, length: int, total: int, masked: bool, backward: bool = True) -> None:
    tokens, positions, mask = _batch(length, total)
    more = {"padding_mask": mask} if masked else {}
    losses = model(tokens, positions, None, labels=tokens, **more)
    if backward:
        (losses * ~mask).sum().div(length * tools.BATCH).backward()


def _gradients(model: Any, length: int, total: int, masked: bool | None = None) -> dict[str, Any]:
    """By name of the parameter; a batch with padding has a mask, unless `masked` says otherwise."""
    _backward(model, length, total, length < total if masked is None else masked)
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def _same(expected: dict[str, Any], found: dict[str, Any], where: str) -> None:
    for name, gradient in expected.items():
        distance = float((gradient - found[name]).norm() / gradient.norm().clamp(min=1e-12))
        assert distance < 1e-5, f"{where}: the gradient of {name} is off by {distance:.1e}"


def _same_with_recompute(recompute: dict[str, Any], masked: bool = True, **options: Any) -> None:
    """AssertionError unless this recompute leaves a model's gradients bitwise the same."""
    plain, recomputed = (
        _gradients(_model("aux_loss", **options, **more), LENGTH, tools.SEQUENCE, masked=masked)
        for more in ({}, recompute)
    )
    tools.all_same_bits(plain, recomputed, "gradient of ")


def _counts(model: Any, length: int, total: int, backward: bool = True) -> list[list[float]]:
    """What the router of each layer counts in one step."""
    _backward(model, length, total, length < total, backward)
    return [router.local_tokens_per_expert.tolist() for router in tools.routers(model)]


def _rank(rank: int, world: int, init_file: str, options: dict[str, Any]) -> None:
    import torch

    tiny.init(world, rank, init_file, **tools.group_sizes(options))
    runs = []
    for total in (LENGTH, tools.SEQUENCE):
        tiny.clear_aux_tracker()
        config = tools.config(
            num_layers=LAYERS, replay=False, **_losses("aux_loss"), **options, **BIAS
        )
        [model] = tiny.model_chunks(config)
        _schedule(model, total)
        runs.append({router.layer_number: _kept(router) for router in tools.routers(model)})
    for layer, (counts, gradient) in runs[0].items():
        found, other = runs[1][layer]
        where = f"rank {rank}, layer {layer}"
        assert found == counts, f"{where}: counts {found}, expected {counts}"
        distance = float((gradient - other).norm() / gradient.norm())
        assert distance < 1e-5, f"{where}: the router's gradient is off by {distance:.1e}"
    assert runs[0], f"rank {rank} has no router"
    torch.distributed.barrier()


def _kept(router: Any) -> tuple[list[float], Any]:
    """What a router has counted, and its gradient: sums over tensor-parallel ranks."""
    import torch
    from megatron.core import parallel_state

    summed = [router.local_tokens_per_expert.clone(), router.weight.grad]
    if router.config.sequence_parallel:
        for tensor in summed:
            group = parallel_state.get_tensor_model_parallel_group()
            torch.distributed.all_reduce(tensor, group=group)
    return summed[0].tolist(), summed[1]


def _schedule(model: Any, total: int) -> None:
    """One training step of microbatches of `LENGTH` tokens, padded to `total`."""

    def forward_step(microbatches: Any, model: Any) -> Any:
        tokens, positions, mask = _batch(LENGTH, total, next(microbatches))
        more = {"padding_mask": mask} if total > LENGTH else {}

        def loss(losses: Any) -> Any:
            mean = (losses * ~mask).sum() / (LENGTH * tools.BATCH)
            return mean, {"loss": mean.detach()}

        return model(tokens, positions, None, labels=tokens, **more), loss

    tools.run_schedule(forward_step, [model], MICROBATCHES, length=total)
