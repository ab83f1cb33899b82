"""The same for the Megatron actor that verl has beside its engine before 0.8."""

import types
from collections.abc import Callable
from typing import Any

from replay_patch.patches.verl.verl_engine_pass import (
    nothing_left,
    refuse_padded,
    source,
    warn_of_one_expert,
    wide_ids,
)
from replay_patch.patches.verl.verl_router_lists import running
from replay_patch.patching import probe
from replay_patch.patching.patch import Patch
from replay_patch.patching.rebinding import content
from replay_patch.patching.transaction import Transaction

_MODULE = "verl.workers.actor.megatron_actor"
_ACTOR = f"{_MODULE}:MegatronPPOActor"
_PASS, _RECORD = "forward_backward_batch", "compute_log_prob"


def _needed() -> tuple[bool, str]:
    clears = "finally:" in source(probe.find(f"{_ACTOR}.{_PASS}"))
    return not clears, f"{_PASS} has {'a' if clears else 'no'} finally"


def _apply(transaction: Transaction) -> None:
    actor = probe.find(_ACTOR)
    transaction.wrap(actor, _PASS, _clean)
    transaction.wrap(actor, _RECORD, _recorded)


def _recorded(original: Callable[..., Any]) -> Callable[..., Any]:
    if not hasattr(original, "__wrapped__"):  # verl's memory logger does not say what it wraps
        cells = map(content, original.__closure__ or ())
        [inner] = [c for c in cells if isinstance(c, types.FunctionType)]
        original.__wrapped__ = inner  # type: ignore[attr-defined]
    run = wide_ids(original)

    def compute_log_prob(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.enable_routing_replay:
            return original(self, *args, **kwargs)
        with running(self.actor_module):  # it asks for the routers after the pass, too
            return run(self, *args, **kwargs)

    return compute_log_prob


def _clean(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward_backward_batch(self: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.enable_routing_replay:
            return original(self, data, *args, **kwargs)
        if not self.config.megatron.use_remove_padding:
            one = kwargs.get("micro_batch_size") == 1 and not kwargs.get("use_dynamic_bsz")
            if not one and len(data) > 1:
                refuse_padded("actor_rollout_ref.actor.megatron.use_remove_padding")
        warn_of_one_expert(self.tf_config, self.config.router_replay.mode)
        with running(self.actor_module), nothing_left(self):
            return original(self, data, *args, **kwargs)

    return forward_backward_batch


PATCH = Patch(
    name="verl_actor_pass",
    library="verl",
    targets=(f"{_ACTOR}.{_PASS}", f"{_ACTOR}.{_RECORD}"),
    modules=(_MODULE,),
    requires="verl",
    why="What verl_engine_pass is for, in the other place of 0.7 that does the same.",
    how=(
        f"`{_PASS}` is verl's own, with actions, targets and recordings cleared when it raises, "
        "and with padded microbatches of several sequences refused. In both verl's helpers find "
        f"the routers of this actor's model. In `{_RECORD}`, with more than 256 experts, "
        "`torch.uint8` means int32."
    ),
    upstream="verl 0.8 has no such actor",
    remove_when="0.7 is no longer supported",
    needed=_needed,
    apply=_apply,
)
