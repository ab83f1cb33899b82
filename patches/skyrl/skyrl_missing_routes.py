"""SkyRL says early which samples came back without routes."""

import inspect
import sys
from collections.abc import Callable
from typing import Any

from replay_patch.errors import RouteError
from replay_patch.patching import probe
from replay_patch.patching.patch import Patch
from replay_patch.patching.transaction import Transaction

_MODULE = "skyrl.train.dataset.preprocess"
_NAME = "convert_prompts_responses_to_batch_tensors"
_FIELD = "rollout_expert_indices"


def _needed() -> tuple[bool, str]:
    takes = _FIELD in probe.parameters(f"{_MODULE}:{_NAME}")
    return takes, f"samples without routes get {'zeros' if takes else 'nothing'}"


def _apply(transaction: Transaction) -> None:
    transaction.wrap_everywhere(sys.modules[_MODULE], _NAME, _checking)


def _checking(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def convert(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        check(given.get(_FIELD), given["loss_masks"])
        return original(*args, **kwargs)

    return convert


def check(routes: Any, loss_masks: Any) -> None:
    """Raise RouteError if a sample that is trained on has no routes; None: replay is off.

    A sample that failed in the rollout, which SkyRL masks out as a whole, may lack them.
    """
    if routes is None:
        return
    missing = [
        number
        for number, (given, mask) in enumerate(zip(routes, loss_masks, strict=True))
        if (given is None or not len(given)) and any(mask)
    ]
    if missing:
        raise RouteError(
            f"SkyRL: sample {missing[0]} has no {_FIELD} ({len(missing)} of {len(routes)} samples "
            f"have none: {missing[:8]}{' ...' if len(missing) > 8 else ''}), although the engine "
            "was asked for them (generator.inference_engine.enable_return_routed_experts); "
            "expected the experts of each token. Look at the engine's answer, and at what a "
            "custom generator or agent loop copies of it"
        )


PATCH = Patch(
    name="skyrl_missing_routes",
    library="skyrl",
    targets=(f"{_MODULE}:{_NAME}",),
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
    apply=_apply,
)
