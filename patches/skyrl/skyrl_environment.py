"""Without this patch REPLAY_PATCH, set for the driver, does not reach SkyRL's Ray workers: the
models train without this plugin."""

from collections.abc import Callable
from typing import Any

from replay_patch.patching import Patch, probe, wrappers_at
from replay_patch.settings import PREFIX, variables

_MODULE = "skyrl.train.utils.utils"
_TARGET = f"{_MODULE}:prepare_runtime_environment"


def _needed() -> tuple[bool, str]:
    if probe.find(_TARGET) is None:
        return False, "this release makes no environment for its workers"
    # Read and not called: it wants the whole configuration, logs, and may start Ray.
    listed = PREFIX in probe.constants(_TARGET)
    return not listed, f"its list of what workers get {'has' if listed else 'lacks'} our variables"


def _forwarding_runtime_environment(original: Callable[..., Any]) -> Callable[..., Any]:
    def prepare_runtime_environment(*args: Any, **kwargs: Any) -> dict[str, str]:
        return {**variables(), **original(*args, **kwargs)}

    return prepare_runtime_environment


PATCH = Patch(
    name="skyrl_environment",
    library="skyrl",
    targets=(_TARGET,),
    modules=(_MODULE,),
    requires="skyrl",
    why=(
        "Ray workers of a cluster that is running already have the environment of `ray start`, "
        "and of the driver only what SkyRL lists: REPLAY_PATCH=1 before a launch command would "
        "reach the driver alone, and the models would train without this plugin."
    ),
    how="What it returns, with the driver's REPLAY_PATCH* variables added.",
    upstream="none: it follows from this plugin's own need for its variables",
    remove_when="SkyRL hands on the driver's variables",
    needed=_needed,
    apply=wrappers_at({_TARGET: _forwarding_runtime_environment}),
)
