"""Without this patch a model with multi-token prediction and full recompute fails in its first step
on 0.18, which gives a method a `padding_mask` that it does not take."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from replay_patch.patching import Patch, Transaction, probe
from replay_patch.patching.rebinding import Instead
from replay_patch.refusals import installed_megatron

_MODULE = "megatron.core.transformer.multi_token_prediction"
_LAYER = f"{_MODULE}:MultiTokenPredictionLayer"
_RECOMPUTE, _INNER = "_checkpointed_forward", "_proj_and_transformer_layer"


def _needed() -> tuple[bool, str]:
    if "padding_mask" not in probe.parameters(f"{_LAYER}.forward"):
        return False, "this release's MTP layer takes no padding_mask"
    function = probe.find(f"{_LAYER}.{_RECOMPUTE}")
    parameters = inspect.signature(function).parameters
    takes = "padding_mask" in parameters or any(
        p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()
    )
    if not takes and "padding_mask" not in probe.parameters(f"{_LAYER}.{_INNER}"):
        raise LookupError(
            f"{_INNER} of {installed_megatron()} is not the function that we know: it takes no "
            "padding_mask"
        )
    return not takes, f"{_RECOMPUTE} takes {'the' if takes else 'no'} padding_mask that it is given"


def _apply(transaction: Transaction) -> None:
    transaction.wrap(probe.find(_LAYER), _RECOMPUTE, _masked_checkpointed_forward)


def _masked_checkpointed_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    def _checkpointed_forward(
        self: Any, *args: Any, padding_mask: Any = None, **kwargs: Any
    ) -> Any:
        if padding_mask is None:
            return original(self, *args, **kwargs)
        # In the checkpoint's closure, which the recompute calls again: the checkpoint itself keeps
        # only tensors, and gets no more than before.
        inner = functools.partial(getattr(self, _INNER), padding_mask=padding_mask)
        return original(Instead(self, **{_INNER: inner}), *args, **kwargs)

    return _checkpointed_forward


PATCH = Patch(
    name="mtp_recompute_mask",
    library="megatron",
    targets=(f"{_LAYER}.{_RECOMPUTE}",),
    requires=_MODULE,
    relies_on=(f"{_LAYER}.forward", f"{_LAYER}.{_INNER}"),
    checks=("mtp-recompute",),
    why=(
        "0.18 calls the method with `padding_mask`, and the method does not take it: a TypeError "
        "in the first step of every model with MTP and full recompute, mask or not."
    ),
    how=(
        "A wrapper that takes the mask and runs the release's own code, whose checkpoint then runs "
        "the block with it, in the recompute, too. The mask is closed over and no argument of the "
        "checkpoint."
    ),
    upstream="https://github.com/NVIDIA/Megatron-LM/pull/4916",
    remove_when="0.18 is no longer supported",
    needed=_needed,
    apply=_apply,
)
