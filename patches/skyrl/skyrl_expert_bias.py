"""Without this patch SkyRL's correction of the expert bias fails where Megatron, or a patch of
ours, has made the same correction already."""

from collections.abc import Callable
from typing import Any

from replay_patch.patches.megatron import expert_bias_mask  # it asks Megatron the same question
from replay_patch.patching import Patch, probe, wrappers_at

_MODULE = "skyrl.backends.skyrl_train.utils.replay_utils"
_TARGET = f"{_MODULE}:patch_topk_router_expert_bias_padding_mask"


def _needed() -> tuple[bool, str]:
    has_it = probe.find(_TARGET) is not None
    return has_it, f"this release {'corrects' if has_it else 'does not touch'} the expert bias"


def _correction_where_needed(original: Callable[..., Any]) -> Callable[..., Any]:
    def patch_topk_router_expert_bias_padding_mask(*args: Any, **kwargs: Any) -> None:
        if not expert_bias_mask.takes_masks_of_tokens():
            original(*args, **kwargs)

    return patch_topk_router_expert_bias_padding_mask


PATCH = Patch(
    name="skyrl_expert_bias",
    library="skyrl",
    targets=(_TARGET,),
    modules=(_MODULE,),
    requires="skyrl",
    why=(
        "It gives `_apply_expert_bias` every mask as [tokens, 1]. A Megatron that does so itself "
        "(its main branch) makes that [tokens, 1, 1], allocates tokens x tokens x experts, and "
        "fails. In no SkyRL release yet, but on its main branch."
    ),
    how=(
        "It runs only where a call with two tokens and three experts counts wrongly: not where "
        "Megatron, or the patch `expert_bias_mask`, has done the same already."
    ),
    upstream="none: the fault is on SkyRL's main branch, and in no release yet",
    remove_when="SkyRL asks before it patches",
    needed=_needed,
    apply=wrappers_at({_TARGET: _correction_where_needed}),
)
