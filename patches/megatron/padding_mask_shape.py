"""A padding mask fits the hidden states of each MoE layer, and is cut for it once (0.16 on)."""

import inspect
from collections.abc import Callable
from typing import Any

from replay_patch.patching import Patch, Transaction, probe

_MODULE = "megatron.core.transformer.moe.moe_layer"
_TARGET = f"{_MODULE}:MoELayer.forward"


def _needed() -> tuple[bool, str]:
    takes = "padding_mask" in probe.parameters(_TARGET)
    return takes, f"MoELayer.forward takes {'a' if takes else 'no'} padding_mask"


def _apply(transaction: Transaction) -> None:
    transaction.wrap(probe.find(f"{_MODULE}:MoELayer"), "forward", _wrapped_forward)


def _wrapped_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    from replay_patch.replay import padding_rows

    index = list(inspect.signature(original).parameters).index("padding_mask") - 2

    def forward(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("padding_mask") is not None:
            mask = kwargs["padding_mask"]
            kwargs["padding_mask"] = padding_rows.mask_of_layer(self, mask, hidden_states)
        elif len(args) > index and args[index] is not None:
            mask = padding_rows.mask_of_layer(self, args[index], hidden_states)
            args = (*args[:index], mask, *args[index + 1 :])
        return original(self, hidden_states, *args, **kwargs)

    return forward


PATCH = Patch(
    name="padding_mask_shape",
    library="megatron",
    targets=(_TARGET,),
    modules=("megatron.core.transformer.moe.router", _MODULE),  # 0.12 ... 0.14 may import one only
    requires=_MODULE,
    checks=("padding-shape",),
    why=(
        "GPTModel cuts the mask for sequence parallelism only where it embeds tokens: later "
        "pipeline stages and hybrid models hand the whole one to routers that hold a part of the "
        "rows. Another shape is an error deep in a loss, or none at all."
    ),
    how=(
        "`MoELayer.forward` takes this rank's part of a mask that is as long as the rows of all "
        "tensor-parallel ranks, leaves one of the right shape alone, and refuses any other."
    ),
    upstream="none known: 0.19.2 still hands the whole mask to later stages",
    remove_when="every model cuts the mask itself",
    needed=_needed,
    apply=_apply,
)
