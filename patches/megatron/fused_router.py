"""Replay with `moe_router_fusion` on the releases that have native replay (0.16 on)."""

import sys
from collections.abc import Callable
from typing import Any

from replay_patch.patching import Patch, Transaction, probe

_UTILS = "megatron.core.transformer.moe.moe_utils"
_ROUTER = "megatron.core.transformer.moe.router"
_NAME = "topk_routing_with_score_function"


def _needed() -> tuple[bool, str]:
    takes = {"fused", "router_replay"} <= probe.parameters(f"{_ROUTER}:{_NAME}")
    return takes, f"{_NAME} takes {'both' if takes else 'not both'} fused and router_replay"


def _apply(transaction: Transaction) -> None:
    transaction.wrap_everywhere(sys.modules[_ROUTER], _NAME, _wrapped_topk_routing)


def _wrapped_topk_routing(original: Callable[..., Any]) -> Callable[..., Any]:
    from replay_patch.patching.compiling import opaque
    from replay_patch.replay import selection

    warn = opaque(selection.warn_unfused)
    refuse = opaque(selection.refuse_precomputed)

    def topk_routing(*args: Any, **kwargs: Any) -> Any:
        replay = kwargs.get("router_replay")
        if replay is not None and replay.router_replay_action is not None:
            if kwargs.get("precomputed_indices") is not None:
                refuse(replay)
            if kwargs.get("fused"):
                warn(replay)
                kwargs["fused"] = False
        return original(*args, **kwargs)

    return topk_routing


PATCH = Patch(
    name="fused_router",
    library="megatron",
    targets=(f"{_UTILS}:{_NAME}", f"{_ROUTER}:{_NAME}"),
    requires=_ROUTER,
    relies_on=(f"{_ROUTER}:TopKRouter.routing",),
    checks=("fused-seam",),
    why=(
        "With `fused=True` the function returns from Transformer Engine's kernel, which takes no "
        "ids, before it looks at `router_replay`: replay is silently off. Precomputed ids "
        "(quantile balancing, 0.19) bypass it in the same way."
    ),
    how=(
        "A wrapper, set wherever the function is bound, that runs unfused (one warning) while the "
        "router records or replays, and refuses precomputed ids then."
    ),
    upstream="none known: in 0.19.2 the fused kernel still takes no ids",
    remove_when="the fused kernel takes ids, or the release itself refuses",
    needed=_needed,
    apply=_apply,
    vital=True,
)
