"""Without this patch a pass of verl's Megatron engine that fails leaves actions, targets and
recordings behind, which the next pass takes for its own; and padded microbatches are replayed in
the wrong rows."""

import sys
from collections.abc import Callable
from typing import Any

from replay_patch.patches.verl import _passes
from replay_patch.patching import Patch, probe, wrappers_at

_MODULE = "verl.workers.engine.megatron.transformer_impl"
_PASS = f"{_MODULE}:MegatronEngine.forward_backward_batch"
_SET = "verl.utils.megatron.router_replay_utils:set_router_replay_data"


def _needed() -> tuple[bool, str]:
    clears = _passes.clears_in_finally(_PASS)
    formats = "data_format" in probe.parameters(_SET)
    return not (clears and formats), (
        f"forward_backward_batch has {'a' if clears else 'no'} finally that clears, and routes "
        f"{'are' if formats else 'are not'} laid out by data_format"
    )


def _checked_forward_backward_batch(original: Callable[..., Any]) -> Callable[..., Any]:
    with_wide_ids = _passes.wide_ids(original)

    def forward_backward_batch(self: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        if not getattr(self, "enable_routing_replay", False):
            return original(self, data, *args, **kwargs)
        tu = sys.modules["verl.utils.tensordict_utils"]  # the engine has imported it

        def setting(key: str, default: Any) -> Any:
            return tu.get_non_tensor_data(data=data, key=key, default=default)

        by_one = (
            not setting("use_dynamic_bsz", True) and setting("micro_batch_size_per_gpu", 0) == 1
        )
        packed = self.engine_config.use_remove_padding or by_one or len(data) == 1
        if setting("enable_routing_replay", False) and not packed:
            _passes.refuse_padded("actor_rollout_ref.model.use_remove_padding")
        _passes.warn_of_one_expert(self.tf_config, self.engine_config.router_replay.mode)
        with _passes.routers_of(self.module), _passes.cleared_after_error(self):
            return with_wide_ids(self, data, *args, **kwargs)

    return forward_backward_batch


PATCH = Patch(
    name="verl_engine_pass",
    library="verl",
    targets=(_PASS,),
    modules=(_MODULE,),
    requires="verl",
    why=(
        "verl clears actions, targets and recorded microbatches only where a pass ends well. After "
        "an exception the next recording has microbatches of the failed one in front, and the next "
        "update's recompute takes the targets that the failed one has left in the queue. With "
        "padded sequences (use_remove_padding=False) routes are laid out as if they were packed: "
        "of sequences of one length in a microbatch each gets the other's rows, and says nothing. "
        "Before 0.9 the helpers do not know whose pass it is, and recorded ids are cast to uint8, "
        "which wraps above 256 experts."
    ),
    how=(
        "`forward_backward_batch` is verl's own, with actions, targets and recordings cleared when "
        "it raises; in it verl's helpers find the routers of this engine's model; replay with "
        "padded microbatches of several sequences is refused; with more than 256 experts "
        "`torch.uint8` means int32 in it. R3 with one expert per token is warned of: zeros, which "
        "verl fills in where nothing was captured, are a valid route then."
    ),
    upstream="none known: verl 0.9.1 still clears only where a pass ends well",
    remove_when="verl clears in a finally, and replays padded batches or refuses them",
    needed=_needed,
    apply=wrappers_at({_PASS: _checked_forward_backward_batch}),
)
