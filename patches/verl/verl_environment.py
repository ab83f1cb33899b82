"""Without this patch REPLAY_PATCH, set for the driver, does not reach verl's Ray workers: the
models train without this plugin."""

import os
from collections.abc import Callable
from typing import Any

from replay_patch.patching import Patch, probe, wrappers_at
from replay_patch.patching.rebinding import Instead, with_globals
from replay_patch.settings import PREFIX, variables

_MODULE = "verl.trainer.constants_ppo"
_TARGET = f"{_MODULE}:get_ppo_ray_runtime_env"


def _needed() -> tuple[bool, str]:
    make = probe.find(_TARGET)
    if make is None:
        return False, "this release makes no environment for its workers"
    # It only reads the environment: it is given one in which our variable is set.
    with_ours = Instead(os, environ={**os.environ, PREFIX: "1"})
    try:
        lacks = PREFIX not in with_globals(make, {"os": with_ours})().get("env_vars", {})
    except Exception:  # noqa: BLE001 - code of any release; ours in front does no harm
        lacks = True
    return lacks, f"what it gives to workers {'lacks' if lacks else 'has'} our variables"


def _forwarding_runtime_env(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_ppo_ray_runtime_env(*args: Any, **kwargs: Any) -> dict[str, Any]:
        runtime_env: dict[str, Any] = original(*args, **kwargs)
        return {**runtime_env, "env_vars": {**variables(), **runtime_env.get("env_vars", {})}}

    return get_ppo_ray_runtime_env


PATCH = Patch(
    name="verl_environment",
    library="verl",
    targets=(_TARGET,),
    modules=(_MODULE,),
    requires="verl",
    why=(
        "Ray workers of a cluster that is running already have the environment of `ray start`, "
        "and of the driver only what verl lists: REPLAY_PATCH=1 before a launch command would "
        "reach the driver alone, and the models would train without this plugin."
    ),
    how="What it returns, with the driver's REPLAY_PATCH* variables added.",
    upstream="none: it follows from this plugin's own need for its variables",
    remove_when="verl hands on the driver's variables",
    needed=_needed,
    apply=wrappers_at({_TARGET: _forwarding_runtime_env}),
)
