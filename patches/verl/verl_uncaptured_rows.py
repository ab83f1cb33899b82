"""Without this patch the -1 of a token without a route becomes 255 where verl packs padded
sequences: no expert, or another one."""

from collections.abc import Callable
from typing import Any

from replay_patch.patching import Patch, probe, wrappers_at
from replay_patch.patching.rebinding import Instead, with_globals

_MODULE = "verl.workers.utils.padding"
_NAME = "left_right_2_no_padding"
_TARGET = f"{_MODULE}:{_NAME}"


def _needed() -> tuple[bool, str]:
    # Read and not called: it calls a package of kernels that is not installed everywhere.
    narrows = "uint8" in probe.names_used(_TARGET)
    return narrows, f"{_NAME} {'makes ids uint8' if narrows else 'leaves ids as they are'}"


def _signed_left_right_2_no_padding(original: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    return with_globals(original, {"torch": Instead(torch, uint8=torch.int32)})


PATCH = Patch(
    name="verl_uncaptured_rows",
    library="verl",
    targets=(_TARGET,),
    modules=(_MODULE,),
    requires="verl",
    why=(
        "verl 0.7.1 and 0.8 make routes uint8 if no id is above 255: the -1 of a token without a "
        "route (verl_rollout_routes) becomes 255, which is no expert, or, of 256, another one."
    ),
    how="The function is verl's own; in it `torch.uint8` means int32, which NCCL can send.",
    upstream="none: rows of -1 are this plugin's own, and verl 0.9 has no such cast",
    remove_when="verl 0.8 is no longer supported",
    needed=_needed,
    apply=wrappers_at({_TARGET: _signed_left_right_2_no_padding}),
)
