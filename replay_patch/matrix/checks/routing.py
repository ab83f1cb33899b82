"""Checks of one router and of one process: recording, replaying, gradients, recompute."""

import copy
import inspect
from typing import Any

from replay_patch.matrix import tiny
from replay_patch.matrix.checks import tools
from replay_patch.matrix.registry import check

VARIANTS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax before top-k": {"moe_router_pre_softmax": True},
    "sigmoid with expert bias": {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    },
    "groups": {"moe_router_num_groups": 3, "moe_router_group_topk": 2, "moe_router_topk": 3},
    "auxiliary and z-loss": {
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 1e-2,
        "moe_z_loss_coeff": 1e-3,
    },
    "capacity": {"moe_expert_capacity_factor": 1.0},
}


@check("record", replays=True)
def record() -> None:
    """A recording router's ids are the release's own top-k, which it goes on to use."""
    tiny.init()
    for name, options in VARIANTS.items():
        router, native = _pair(options)
        found, expected = _run(router, action="RECORD"), _run(native)
        tools.all_same_bits(expected, found, f"{name}, recording: ")
        if "capacity" not in name:  # which drops some of what is chosen
            ids = router.router_replay.get_recorded_indices()
            tools.same_map(expected["map"], tools.as_map(ids), f"{name}: the recorded ids")


@check("replay", replays=True)
def replay() -> None:
    """Replaying a router's own ids gives bitwise the release's native output; others are used as
    given, with probabilities from the training scores."""
    import torch

    tiny.init()
    for name, options in VARIANTS.items():
        router, native = _pair(options)
        expected = _run(native)
        _run(router, action="RECORD")
        ids = router.router_replay.get_recorded_indices()
        found = _run(router, ids=ids)
        for what in ("probs", "map"):
            tools.same_bits(expected[what], found[what], f"{name}, its own ids: {what}")

    router, _ = _pair({})
    ids = tools.some_ids()
    found = _run(router, ids=ids)
    tools.same_map(tools.as_map(ids), found["map"], "other ids")
    logits = torch.nn.functional.linear(tools.hidden_states(), router.weight).flatten(0, 1)
    wanted = torch.zeros_like(logits).scatter(1, ids, logits.gather(1, ids).softmax(1))
    assert torch.allclose(wanted, found["probs"], atol=1e-6), "other ids: other probabilities"


@check("gradient", replays=True)
def gradient() -> None:
    """Gradients flow through the replayed experts: bitwise the native ones for the router's own
    ids, and not zero for experts that it would not have chosen."""
    tiny.init()
    for name, options in VARIANTS.items():
        router, native = _pair(options)
        expected = _run(native)
        _run(router, action="RECORD")
        found = _run(router, ids=router.router_replay.get_recorded_indices())
        for what in ("weight gradient", "input gradient"):
            tools.same_bits(expected[what], found[what], f"{name}, its own ids: {what}")

    router, _ = _pair({})
    picked = _run(router)["map"]
    ids = picked.double().argsort(1)[:, : tools.TOPK]  # of each token, experts not picked
    assert not (picked & tools.as_map(ids)).any()
    gradients = _run(router, ids=ids)["weight gradient"]
    silent = [e for e in ids.unique().tolist() if not gradients[e].any()]
    assert not silent, f"replayed experts {silent} get no gradient"


@check("recompute", replays=True)
def recompute() -> None:
    """With activation recompute, in full or of the MoE layers alone, the recompute sees the experts
    of its forward, and all gradients are bitwise those without recompute."""
    tiny.init()
    kinds: dict[str, dict[str, Any]] = {
        "full, uniform": tools.FULL,
        "full, block": tools.FULL | {"recompute_method": "block"},
        "selective, moe": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    }
    reference, calls = train({})
    assert calls == 2, f"two routers ran {calls} times without recompute"
    for name, options in kinds.items():
        gradients, calls = train(options)
        expected = 3 if "block" in name else 4
        assert calls == expected, f"{name}: routers ran {calls} times, expected {expected}"
        tools.all_same_bits(reference, gradients, f"{name}: gradient of ")


@check("fused-router", replays=True)
def fused_router() -> None:
    """A fused router runs unfused while it records or replays, and says so once; where a release
    has none, the flag is accepted."""
    from megatron.core.transformer.moe.router import TopKRouter

    tiny.init()
    calls = tools.provide_fused_kernel()
    router, _ = _pair({}, moe_router_fusion=True)
    ids = tools.some_ids()
    tools.same_map(tools.as_map(ids), _run(router, ids=ids)["map"], "fused and replaying")
    _run(router, action="RECORD")
    assert not calls, "the fused kernel ran while the router replayed or recorded"
    _run(router)
    expected = ["fused"] if "fused" in inspect.getsource(TopKRouter) else []
    assert calls == expected, f"idle, the fused kernel ran {len(calls)} times"


@check("refusals", replays=True)
def refusals() -> None:
    """What cannot be replayed rightly is refused: a missing target, rows or columns that do not
    fit, ids out of range, a router that does not select by top-k."""
    tiny.init()
    ids = tools.some_ids()
    for what, bad in {
        "no target": None,
        "a row too few": ids[:-1],
        "a row too many": tools.some_ids(rows=tools.TOKENS + 1),
        "a column too few": ids[:, :1],
        "an id beyond the last expert": ids + tools.EXPERTS,
        "a negative id": ids - tools.EXPERTS,
    }.items():
        router, _ = _pair({})
        with tools.refused(what):
            _run(router, action="REPLAY_FORWARD", ids=bad)
    sinkhorn, _ = _pair({"moe_router_load_balancing_type": "sinkhorn"})
    with tools.refused("a sinkhorn router"):
        _run(sinkhorn.eval(), ids=ids)


@check("padding-mask", replays=True)
def padding_mask() -> None:
    """A replaying router honours `padding_mask` as the native one does: for the router's own ids,
    output and gradients, auxiliary losses included, are bitwise the same."""
    import torch

    tiny.init()
    mask = torch.zeros(tools.SEQUENCE, tools.BATCH, dtype=torch.bool)
    mask[-2:, 0] = True
    router, native = _pair(VARIANTS["auxiliary and z-loss"])
    expected, unmasked = _run(native, padding_mask=mask), _run(native)
    assert not torch.equal(expected["weight gradient"], unmasked["weight gradient"])
    _run(router, action="RECORD", padding_mask=mask)
    ids = router.router_replay.get_recorded_indices()
    found = _run(router, ids=ids, padding_mask=mask)
    tools.all_same_bits(expected, found, "with a padding mask: ")


def _pair(options: dict[str, Any], **later: Any) -> tuple[Any, Any]:
    """A router with replay on, and one with the same weights that never had it on."""
    config = tools.config(**options)
    for name, value in later.items():
        setattr(config, name, value)
    router = tiny.router(config, layer_number=3).train()
    plain = copy.copy(config)
    plain.enable_routing_replay = plain.moe_enable_routing_replay = False
    native = tiny.router(plain, layer_number=3).train()
    native.load_state_dict(router.state_dict())
    return router, native


def _run(router: Any, *, action: str = "", ids: Any = None, **kwargs: Any) -> dict[str, Any]:
    """The outputs and gradients of one router's forward and backward."""
    import torch
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    if ids is not None or action:
        router.router_replay.clear_indices()
        if ids is not None:
            router.router_replay.set_target_indices(ids)
        wanted = RouterReplayAction[action or "REPLAY_FORWARD"]
        router.router_replay.set_router_replay_action(wanted)
    hidden = tools.hidden_states()
    try:
        probs, routing_map = router(hidden, **kwargs)
    finally:
        if router.router_replay is not None:
            router.router_replay.clear_router_replay_action()
    weights = torch.randn(probs.shape, generator=torch.Generator().manual_seed(5))
    router.weight.grad = None
    out = {"probs": probs.detach(), "map": routing_map}
    if probs.requires_grad:  # our stand-in of the fused kernel has no backward
        (probs * weights).sum().backward()
        out |= {"weight gradient": router.weight.grad, "input gradient": hidden.grad}
    return out


def train(options: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Gradients of a model of two layers that replays, and how often its routers ran."""
    import torch
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    model = tiny.gpt_model(tools.config(num_layers=2, **options))
    routers = tools.routers(model)
    wanted = {router: tools.some_ids(seed) for seed, router in enumerate(routers)}
    calls = []

    def watch(router: Any, _: Any, output: Any) -> None:
        calls.append(router)
        where = f"{options or 'no recompute'}, call {len(calls)}"
        tools.same_map(tools.as_map(wanted[router]), output[1], where)

    for router, ids in wanted.items():
        router.register_forward_hook(watch)
        router.router_replay.set_target_indices(ids)
        router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    tokens = torch.arange(tools.TOKENS).reshape(tools.BATCH, tools.SEQUENCE)
    positions = torch.arange(tools.SEQUENCE).expand(tools.BATCH, -1)
    loss = model(tokens, positions, None, labels=tokens.flip(0)).float().mean()
    for router in routers:
        router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
    loss.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, len(calls)
