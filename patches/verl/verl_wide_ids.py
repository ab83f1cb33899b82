"""Without this patch the ids that verl records wrap at 256: expert 300 becomes 44 in the replay."""

from replay_patch.patches.verl._passes import casts_to_uint8, wide_ids
from replay_patch.patching import Patch, wrappers_at

_MODULE = "verl.utils.megatron.router_replay_utils"
_NAME = "merge_router_topk_indices"
_TARGET = f"{_MODULE}:{_NAME}"


def _needed() -> tuple[bool, str]:
    narrows = casts_to_uint8(_TARGET)
    return narrows, f"{_NAME} casts {'' if narrows else 'not '}to uint8"


PATCH = Patch(
    name="verl_wide_ids",
    library="verl",
    targets=(_TARGET,),
    modules=(_MODULE,),
    requires="verl",
    why=(
        "Before 0.9 recorded ids are cast to uint8: with more than 256 experts (Kimi K2, "
        "Qwen3-Next) expert 300 becomes 44 in the replay, and nothing says so."
    ),
    how="With more than 256 experts `torch.uint8` means int32 in the function.",
    upstream="verl commit bf48903d9 (0.9)",
    remove_when="verl 0.8 is no longer supported",
    needed=_needed,
    apply=wrappers_at({_TARGET: wide_ids}),
)
