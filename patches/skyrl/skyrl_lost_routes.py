"""Without this patch SkyRL trains a batch that has lost all its routes on native routing, although
replay is on."""

from collections.abc import Callable
from typing import Any

from replay_patch.patches.skyrl._batches import FIELD, refuse_missing
from replay_patch.patching import Patch, probe, wrappers_at

_MODULE = "skyrl.train.trainer"
_TARGET = f"{_MODULE}:RayPPOTrainer.convert_to_training_input"


def _needed() -> tuple[bool, str]:
    # Read and not called: it wants a trainer, and logs.
    takes = FIELD in probe.constants(_TARGET)
    return takes, f"it {'takes a batch without' if takes else 'does not know'} {FIELD}"


def _checked_convert_to_training_input(original: Callable[..., Any]) -> Callable[..., Any]:
    def convert_to_training_input(
        self: Any, generator_output: Any, *args: Any, **kwargs: Any
    ) -> Any:
        asked = self.cfg.generator.inference_engine.enable_return_routed_experts
        if asked and generator_output.get(FIELD) is None:
            masks = generator_output["loss_masks"]
            refuse_missing([None] * len(masks), masks)
        return original(self, generator_output, *args, **kwargs)

    return convert_to_training_input


PATCH = Patch(
    name="skyrl_lost_routes",
    library="skyrl",
    targets=(_TARGET,),
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
    apply=wrappers_at({_TARGET: _checked_convert_to_training_input}),
)
