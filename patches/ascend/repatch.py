"""Without this patch patches of ours are gone whenever MindSpeed patches again or takes its patches
back."""

from collections.abc import Callable
from typing import Any

from replay_patch.patching import Patch, Transaction, activation, probe
from replay_patch.patching.wrappers import module_of

_MODULE = "mindspeed.patch_utils"
_MANAGER = f"{_MODULE}:MindSpeedPatchesManager"


def _needed() -> tuple[bool, str]:
    if probe.find(f"{_MANAGER}.apply_patches") is None:
        raise LookupError("MindSpeedPatchesManager has no apply_patches")
    return True, "MindSpeed sets every place it once patched again, whatever is there"


def _apply(transaction: Transaction) -> None:
    manager = probe.find(_MANAGER)
    transaction.wrap(manager, "apply_patches", _apply_patches_then_ours)
    if hasattr(manager, "remove_patches"):  # not in 2.1
        transaction.wrap(manager, "remove_patches", _remove_patches_under_ours)
    transaction.cleanups.append(lambda: _forget_ours(manager))


def _forget_ours(manager: Any) -> None:
    """Where MindSpeed's note of an original is a function of ours, let it be what that wraps."""
    for patch in manager.patches_info.values():
        function: Any = getattr(patch, "orig_func", None)
        while module_of(function).startswith("replay_patch.") and hasattr(function, "__wrapped__"):
            function = patch.orig_func = function.__wrapped__


def _apply_patches_then_ours(original: Callable[..., Any]) -> Callable[..., Any]:
    def apply_patches(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        finally:
            activation.reinstall()

    return apply_patches


def _remove_patches_under_ours(original: Callable[..., Any]) -> Callable[..., Any]:
    def remove_patches(*args: Any, **kwargs: Any) -> Any:
        # It restores an original only where its own function is on top.
        patches = probe.find(_MANAGER).patches_info.values()
        activation.uncover([p.final_patch_func for p in patches if p.is_applied])
        try:
            return original(*args, **kwargs)
        finally:
            activation.reinstall()

    return remove_patches


PATCH = Patch(
    name="repatch",
    library="ascend",
    targets=(f"{_MANAGER}.apply_patches", f"{_MANAGER}.remove_patches"),
    modules=(_MODULE,),
    requires="mindspeed",
    checks=("config-fields", "config-mla", "config-subclass", "npu-unaligned"),
    why=(
        "Each `repatch()` (verl calls it once for every engine) sets all places that MindSpeed "
        "ever patched to its own wrappers around what it found there first, or to that: patches "
        "that were made in between are gone, and a marker on a class still says that they are "
        "there."
    ),
    how=(
        "After each `apply_patches` and `remove_patches` every patch is verified by identity and, "
        "if it was lost, applied again on top of what MindSpeed has put there. Before "
        "`remove_patches` ours come off what MindSpeed is about to take back."
    ),
    upstream="https://github.com/volcengine/verl/pull/5967",
    remove_when="MindSpeed is no longer supported",
    needed=_needed,
    apply=_apply,
)
