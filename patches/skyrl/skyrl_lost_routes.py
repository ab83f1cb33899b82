"""SkyRL's trainer refuses a batch that has lost its routes as a whole."""

import inspect
from collections.abc import Callable
from typing import Any

from replay_patch.patches.skyrl import skyrl_missing_routes
from replay_patch.patching import probe
from replay_patch.patching.patch import Patch
from replay_patch.patching.transaction import Transaction

_MODULE = "skyrl.train.trainer"
_TRAINER = f"{_MODULE}:RayPPOTrainer"
_NAME = "convert_to_training_input"
_FIELD = "rollout_expert_indices"


def _needed() -> tuple[bool, str]:
    function = probe.find(f"{_TRAINER}.{_NAME}")
    takes = function is not None and _FIELD in inspect.unwrap(function).__code__.co_consts
    return takes, f"it {'takes a batch without' if takes else 'does not know'} {_FIELD}"


def _apply(transaction: Transaction) -> None:
    transaction.wrap(probe.find(_TRAINER), _NAME, _checking)


def _checking(original: Callable[..., Any]) -> Callable[..., Any]:
    def convert_to_training_input(
        self: Any, generator_output: Any, *args: Any, **kwargs: Any
    ) -> Any:
        asked = self.cfg.generator.inference_engine.enable_return_routed_experts
        if asked and generator_output.get(_FIELD) is None:
            masks = generator_output["loss_masks"]
            skyrl_missing_routes.check([None] * len(masks), masks)
        return original(self, generator_output, *args, **kwargs)

    return convert_to_training_input


PATCH = Patch(
    name="skyrl_lost_routes",
    library="skyrl",
    targets=(f"{_TRAINER}.{_NAME}",),
    modules=(_MODULE,),
    requires="skyrl",
    why=(
        "Where an engine or a custom generator returns no routes at all, the batch has none, and "
        "the step trains on native routing, although replay is on."
    ),
    how="With enable_return_routed_experts such a batch is refused, as one sample would be.",
    upstream="none known for 0.3.0, the release that this was written for",
    remove_when="SkyRL refuses such a batch",
    needed=_needed,
    apply=_apply,
)
