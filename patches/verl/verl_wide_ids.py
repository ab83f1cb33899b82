"""Without this patch the ids that verl records wrap at 256: expert 300 becomes 44 in the replay."""

import sys

from replay_patch.patches.verl._passes import casts_to_uint8, wide_ids
from replay_patch.patching import Patch, Transaction

_MODULE = "verl.utils.megatron.router_replay_utils"
_NAME = "merge_router_topk_indices"


def _needed() -> tuple[bool, str]:
    narrows = casts_to_uint8(f"{_MODULE}:{_NAME}")
    return narrows, f"{_NAME} casts {'' if narrows else 'not '}to uint8"


def _apply(transaction: Transaction) -> None:
    transaction.wrap_everywhere(sys.modules[_MODULE], _NAME, wide_ids)


PATCH = Patch(
    name="verl_wide_ids",
    library="verl",
    targets=(f"{_MODULE}:{_NAME}",),
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
    apply=_apply,
)
