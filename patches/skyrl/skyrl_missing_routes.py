"""Without this patch tokens of samples that came back without routes train on expert 0 or on native
routing, and nothing says so."""

import inspect
from collections.abc import Callable
from typing import Any

from replay_patch.patches.skyrl._batches import FIELD, refuse_missing
from replay_patch.patching import Patch, probe, wrappers_at

_MODULE = "skyrl.train.dataset.preprocess"
_TARGET = f"{_MODULE}:convert_prompts_responses_to_batch_tensors"


def _needed() -> tuple[bool, str]:
    takes = FIELD in probe.parameters(_TARGET)
    return takes, f"samples without routes get {'zeros' if takes else 'nothing'}"


def _checked_convert_to_tensors(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def convert(*args: Any, **kwargs: Any) -> Any:
        samples = signature.bind(*args, **kwargs).arguments
        refuse_missing(samples.get(FIELD), samples["loss_masks"])
        return original(*args, **kwargs)

    return convert


PATCH = Patch(
    name="skyrl_missing_routes",
    library="skyrl",
    targets=(_TARGET,),
    modules=(_MODULE,),
    requires="skyrl",
    why=(
        "A sample that comes back without routes gets zeros, and one batch without any gets none: "
        "these tokens train on expert 0 or on native routing, and nothing says so."
    ),
    how="The samples are looked at before they become tensors; the conversion is SkyRL's own.",
    upstream="none known for 0.3.0, the release that this was written for",
    remove_when="SkyRL refuses such samples",
    needed=_needed,
    apply=wrappers_at({_TARGET: _checked_convert_to_tensors}),
)
