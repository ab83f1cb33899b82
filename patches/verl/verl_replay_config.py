"""Without this patch verl starts R2 with settings under which it fails in the first update, or
replays the rollout's routes for recorded ones."""

from collections.abc import Callable
from typing import Any

from replay_patch.errors import SettingsError
from replay_patch.patching import Patch, probe, wrappers_at

_MODULE = "verl.utils.config"
_NAME = "validate_config"
_TARGET = f"{_MODULE}:{_NAME}"


def _needed() -> tuple[bool, str]:
    # Read and not called: it wants the whole configuration, and prints.
    asks = "enable_rollout_routing_replay" in probe.names_used(_TARGET)
    return not asks, f"{_NAME} {'asks' if asks else 'does not ask'} for the R2 sources"


def _checked_validate_config(original: Callable[..., Any]) -> Callable[..., Any]:
    def validate_config(config: Any, *args: Any, **kwargs: Any) -> Any:
        if "R2" in _modes(config.actor_rollout_ref.actor):
            correction = config.algorithm.get("rollout_correction") or {}
            if correction.get("bypass_mode"):
                _refuse(
                    "algorithm.rollout_correction.bypass_mode=True",
                    "it leaves out the pass that records the routes. Set bypass_mode=False, or "
                    "router_replay.mode=R3",
                )
            if config.actor_rollout_ref.rollout.get("enable_rollout_routing_replay"):
                _refuse(
                    "actor_rollout_ref.rollout.enable_rollout_routing_replay=True",
                    "the routes of the rollout would be in the place of the recorded ones. Set it "
                    "to False, or router_replay.mode=R3",
                )
        return original(config, *args, **kwargs)

    return validate_config


def _modes(actor: Any) -> set[Any]:
    """Replay modes of the actor: its own (0.7, 0.8), and its engine's (0.7.1 on)."""
    configs = (actor, actor.get(actor.get("strategy") or "megatron"))
    return {(config.get("router_replay") or {}).get("mode") for config in configs if config}


def _refuse(setting: str, why: str) -> None:
    raise SettingsError(f"verl: router_replay.mode=R2 with {setting}: {why}")


PATCH = Patch(
    name="verl_replay_config",
    library="verl",
    targets=(_TARGET,),
    modules=(_MODULE,),
    requires="verl",
    why=(
        "R2 replays what the old-log-prob pass has recorded. With `bypass_mode` there is no such "
        "pass, and the first update fails (from 0.9 on verl refuses it). With "
        "`enable_rollout_routing_replay` the rollout's routes are in the batch: up to 0.8 verl "
        "fails when it joins the recorded ones; 0.9 records nothing, and replays the rollout's "
        "without the mask that R3 has for rows that were not captured."
    ),
    how=f"Before `{_NAME}`, wherever it is bound, both are refused with R2.",
    upstream="https://github.com/verl-project/verl/pull/7805",
    remove_when="verl refuses both",
    needed=_needed,
    apply=wrappers_at({_TARGET: _checked_validate_config}),
)
