"""A router that is built with replay on, where replay would be ignored, is refused."""

from collections.abc import Callable
from typing import Any

from replay_patch.megatron.ascend import refuse_features
from replay_patch.megatron.config import replay_enabled
from replay_patch.patching import Patch, Transaction, activation, probe

_MODULE = "megatron.core.transformer.moe.router"
_BASE = f"{_MODULE}:Router"


def _needed() -> tuple[bool, str]:
    return True, "no release looks whether replay can work"


def _apply(transaction: Transaction) -> None:
    transaction.wrap(probe.find(_BASE), "__init__", _wrapped_init)


def _wrapped_init(original: Callable[..., None]) -> Callable[..., None]:
    from replay_patch.replay.router_checks import refuse_unknown_class

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if replay_enabled(self.config):
            activation.require_replay(f"{type(self).__name__} with routing replay on")
            refuse_unknown_class(type(self))
            refuse_features(self.config)

    return __init__


PATCH = Patch(
    name="router_guard",
    library="megatron",
    targets=(f"{_BASE}.__init__",),
    requires=_MODULE,
    relies_on=(f"{_MODULE}:",),
    checks=("guard", "npu-refusals"),
    why=(
        "Where another patch failed, is skipped or was overwritten, or the router is of a class "
        "that bypasses Megatron's TopKRouter, a config with replay on would train with other "
        "experts than the rollout's, and say nothing."
    ),
    how=(
        "After `Router.__init__`, if the config has replay on: PatchNotActive unless all that "
        "replay stands on is in place, RouteError for an unknown class, or for a feature of "
        "MindSpeed's that is not replayed (docs/mindspeed.md)."
    ),
    upstream="none: it guards this plugin's own patches",
    remove_when="never: it is what makes a failed patch loud",
    needed=_needed,
    apply=_apply,
    vital=True,
)
