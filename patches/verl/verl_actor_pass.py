"""Without this patch a failed pass of the Megatron actor that verl 0.7 has beside its engine leaves
actions, targets and recordings behind, and padded microbatches are replayed in the wrong rows."""

import types
from collections.abc import Callable
from typing import Any

from replay_patch.patches.verl import _passes
from replay_patch.patching import Patch, wrappers_at
from replay_patch.patching.rebinding import content

_MODULE = "verl.workers.actor.megatron_actor"
_ACTOR = f"{_MODULE}:MegatronPPOActor"
_PASS, _RECORD = "forward_backward_batch", "compute_log_prob"


def _needed() -> tuple[bool, str]:
    clears = _passes.clears_in_finally(f"{_ACTOR}.{_PASS}")
    return not clears, f"{_PASS} has {'a' if clears else 'no'} finally"


def _wide_compute_log_prob(original: Callable[..., Any]) -> Callable[..., Any]:
    if not hasattr(original, "__wrapped__"):  # verl's memory logger does not say what it wraps
        cells = map(content, original.__closure__ or ())
        [wrapped] = [c for c in cells if isinstance(c, types.FunctionType)]
        original.__wrapped__ = wrapped  # type: ignore[attr-defined]
    with_wide_ids = _passes.wide_ids(original)

    def compute_log_prob(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.enable_routing_replay:
            return original(self, *args, **kwargs)
        with _passes.routers_of(self.actor_module):  # it asks for the routers after the pass, too
            return with_wide_ids(self, *args, **kwargs)

    return compute_log_prob


def _checked_forward_backward_batch(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward_backward_batch(self: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.enable_routing_replay:
            return original(self, data, *args, **kwargs)
        if not self.config.megatron.use_remove_padding:
            by_one = kwargs.get("micro_batch_size") == 1 and not kwargs.get("use_dynamic_bsz")
            if not by_one and len(data) > 1:
                _passes.refuse_padded("actor_rollout_ref.actor.megatron.use_remove_padding")
        _passes.warn_of_one_expert(self.tf_config, self.config.router_replay.mode)
        with _passes.routers_of(self.actor_module), _passes.cleared_after_error(self):
            return original(self, data, *args, **kwargs)

    return forward_backward_batch


PATCH = Patch(
    name="verl_actor_pass",
    library="verl",
    targets=(f"{_ACTOR}.{_PASS}", f"{_ACTOR}.{_RECORD}"),
    modules=(_MODULE,),
    requires="verl",
    why=(
        "verl 0.7 trains with this actor, or with its engine. The actor, too, clears actions, "
        "targets and recorded microbatches only where a pass ends well: after an exception the "
        "next recording has microbatches of the failed one in front, and the next update's "
        "recompute takes the targets that the failed one has left in the queue. With padded "
        "sequences (use_remove_padding=False) tokens get the rows of other sequences, and nothing "
        "says so. The helpers do not know whose pass it is, and recorded ids are cast to uint8, "
        "which wraps above 256 experts."
    ),
    how=(
        f"`{_PASS}` is verl's own, with actions, targets and recordings cleared when it raises, "
        "and with padded microbatches of several sequences refused. In both verl's helpers find "
        f"the routers of this actor's model. In `{_RECORD}`, with more than 256 experts, "
        "`torch.uint8` means int32."
    ),
    upstream="verl 0.8 has no such actor",
    remove_when="0.7 is no longer supported",
    needed=_needed,
    apply=wrappers_at(
        {
            f"{_ACTOR}.{_PASS}": _checked_forward_backward_batch,
            f"{_ACTOR}.{_RECORD}": _wide_compute_log_prob,
        }
    ),
)
