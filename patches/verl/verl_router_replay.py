"""Without this patch verl replaces Megatron's routing by a copy of one release's, which fails on
others or drops what they have added; and it forgets the routers of every earlier engine."""

import importlib
import sys
from collections.abc import Callable
from typing import Any

from replay_patch.patching import Patch, Transaction, activation, probe

_MODULE = "verl.utils.megatron.router_replay_patch"
_NAMES = ("RouterReplay", "RouterReplayAction")


def _needed() -> tuple[bool, str]:
    # Read and not called: it changes Megatron.
    replaces = "routing" in probe.names_used(f"{_MODULE}:apply_router_replay_patch")
    return replaces, f"apply_router_replay_patch replaces {'' if replaces else 'not '}TopKRouter's"


def _apply(transaction: Transaction) -> None:
    from replay_patch.replay import router_replay

    module = sys.modules[_MODULE]
    native = importlib.import_module(router_replay.MODULE)
    for name in _NAMES:
        transaction.set(module, name, getattr(native, name))
    transaction.set(module, "apply_router_replay_patch", _replaced_router_replay_patch)
    cls = native.RouterReplay
    transaction.set(cls, "router_instances", cls.global_router_replay_instances)
    if "replay_mask" not in probe.parameters(cls.set_target_indices):
        transaction.wrap(cls, "set_target_indices", _masked_set_target_indices)


def _replaced_router_replay_patch() -> None:
    """verl's changes to Megatron are made already, and leave its routing in place. The list of
    routers keeps those of a model built before; an entry leaves it with its router."""
    activation.require_replay("verl's apply_router_replay_patch()")


def _masked_set_target_indices(original: Callable[..., None]) -> Callable[..., None]:
    from replay_patch.replay import target_ids

    def set_target_indices(self: Any, topk_indices: Any, replay_mask: Any = None) -> None:
        mask = _captured(topk_indices, replay_mask)
        if mask is not None:
            topk_indices = target_ids.with_native_rows(topk_indices, mask, self)
        original(self, topk_indices)

    return set_target_indices


def _captured(ids: Any, mask: Any) -> Any:
    """bool [tokens], False: the router's own pick; None: all are to be replayed. `mask` is verl
    0.9's; rows with -1 are tokens without a route. What is on a device is not waited for."""
    fits = mask is None or getattr(mask, "shape", None) == getattr(ids, "shape", ())[:1]
    if getattr(ids, "ndim", 0) != 2 or not fits:
        return mask  # for the check to refuse
    captured = (ids >= 0).all(dim=1)
    if captured.device.type == "cpu" and captured.all():
        return mask
    return captured if mask is None else captured & mask.to(captured.device)


PATCH = Patch(
    name="verl_router_replay",
    library="verl",
    targets=(
        f"{_MODULE}:RouterReplay",
        f"{_MODULE}:RouterReplayAction",
        f"{_MODULE}:apply_router_replay_patch",
    ),
    modules=(_MODULE,),
    requires="verl",
    why=(
        "verl replaces `TopKRouter.routing` by a copy of one release's: on 0.12 and 0.13 it fails "
        "with an auxiliary loss or a capacity factor, on later ones it drops what the release has "
        "added (padding masks, fused and quantile routers, force-balancing). It counts "
        "assignments with a device synchronisation per layer and call, and clears its list of "
        "routers for every engine, so that the routers of the engine before are told nothing any "
        "more and route natively, without a word."
    ),
    how=(
        "Its `RouterReplay` and `RouterReplayAction` are Megatron's (ours before 0.16), with "
        "verl's `router_instances` as another name of the list and verl 0.9's `replay_mask`; rows "
        "of -1 (verl_rollout_routes) are native too; "
        "`apply_router_replay_patch` leaves Megatron alone, and is refused if the plugin is not "
        "fully active. All else of verl is its own."
    ),
    upstream="none known: verl 0.9.1 still replaces `TopKRouter.routing`",
    remove_when="verl uses Megatron's RouterReplay where there is one",
    needed=_needed,
    apply=_apply,
)
