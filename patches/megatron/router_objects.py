"""Every router knows its replay object, and a router that makes no selection is an error."""

import weakref
from collections.abc import Callable
from typing import Any

from replay_patch.megatron.config import replay_enabled, router_cuda_graph, router_fusion
from replay_patch.patching import Patch, Transaction, probe
from replay_patch.refusals import installed_megatron, warn_once

_MODULE = "megatron.core.transformer.moe.router"
_ROUTER = f"{_MODULE}:TopKRouter"
_BASE = f"{_MODULE}:Router"
_SCORES = tuple(
    f"{owner}compute_routing_scores_for_aux_loss"
    for owner in (f"{_ROUTER}.", "megatron.core.transformer.moe.moe_utils:")
)


def _needed() -> tuple[bool, str]:
    # 0.11 has the same classes, but computes its losses in passes without gradient, too.
    if not any(map(probe.find, _SCORES)):
        raise LookupError(
            "neither TopKRouter nor moe_utils has compute_routing_scores_for_aux_loss: this is "
            f"{installed_megatron()}, and replay-patch supports megatron-core 0.12.0 and later"
        )
    return True, "routers have no replay object that knows its layer"


def _apply(transaction: Transaction) -> None:
    router, base = probe.find(_ROUTER), probe.find(_BASE)
    if not hasattr(router, "router_replay"):
        transaction.set(router, "router_replay", None)  # what a router without replay answers
    transaction.wrap(base, "set_layer_number", _wrapped_set_layer_number)
    transaction.wrap(router, "__init__", _wrapped_init)
    transaction.wrap(router, "forward", _wrapped_forward)


def _wrapped_init(original: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        from replay_patch.replay import router_replay

        original(self, *args, **kwargs)
        if isinstance(getattr(self.config, "moe_router_fusion", None), str):
            # Off a command line. The release's own code would take "false" for true.
            self.config.moe_router_fusion = router_fusion(self.config)
        if router_fusion(self.config) and not _can_fuse():
            warn_once(
                "moe_router_fusion is on, but %s has no fused router: it runs unfused",
                installed_megatron(),
            )
        if not replay_enabled(self.config):
            if getattr(self, "router_replay", None) is not None:
                # The release has taken the string "false" for true.
                _remove_from_list(self.router_replay)
                self.router_replay = None
            return
        if self.router_replay is None:
            self.router_replay = router_replay.new()
        replay = self.router_replay
        replay.layer_number = self.layer_number
        replay.num_experts, replay.topk = self.config.num_moe_experts, self.topk
        replay.graphed = router_cuda_graph(self.config)
        # The list is for positional callers; a dead router must not shift their positions.
        weakref.finalize(self, _remove_from_list, replay).atexit = False

    return __init__


def _wrapped_set_layer_number(original: Callable[..., None]) -> Callable[..., None]:
    def set_layer_number(self: Any, layer_number: int) -> None:
        original(self, layer_number)
        if getattr(self, "router_replay", None) is not None:
            self.router_replay.layer_number = layer_number

    return set_layer_number


def _wrapped_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    from replay_patch.patching.compiling import opaque
    from replay_patch.replay import microbatch_tracker, router_call

    run = opaque(router_call.run)
    any_ended = microbatch_tracker.any_ended
    check_ended = opaque(microbatch_tracker.check_ended)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # getattr: a stranger's wrapper may keep this one in place after deactivate().
        replay = getattr(self, "router_replay", None)
        if any_ended[0]:
            check_ended(self)
        if replay is None or replay.router_replay_action is None:
            return original(self, *args, **kwargs)
        return run(self, original, args, kwargs)

    return forward


def _remove_from_list(replay: Any) -> None:
    from replay_patch.replay import router_replay

    entries = router_replay.instances()
    entries[:] = [entry for entry in entries if entry is not replay]


def _can_fuse() -> bool:
    names = ("topk_routing_with_score_function", "topk_softmax_with_capacity")
    return any("fused" in probe.parameters(f"{_MODULE}:{name}") for name in names)


PATCH = Patch(
    name="router_objects",
    library="megatron",
    targets=(f"{_ROUTER}.__init__", f"{_ROUTER}.forward", f"{_BASE}.set_layer_number"),
    requires=_MODULE,
    relies_on=(_ROUTER, *_SCORES),
    checks=("router-objects",),
    why=(
        "Before 0.16 a router has no replay object, from 0.16 on only under Megatron's own config "
        "name; the object knows no layer before 0.19, and its global list keeps dead routers. "
        "Routers that never ask it (sinkhorn, quantile balancing, other code) ignore it silently."
    ),
    how=(
        "`__init__` adds the object if either config name is true, and lets its list entry go when "
        "the router dies. `set_layer_number` passes the number on. `forward` is the original "
        "unless an action is set; then the router is made known to the top-k function, and a "
        "forward that made no selection is an error."
    ),
    upstream="none known: in 0.19.2 a router that never asks still ignores replay",
    remove_when="all supported releases have native replay with layer numbers and checks",
    needed=_needed,
    apply=_apply,
    vital=True,
)
