"""Without this patch the routers of multi-token-prediction blocks have the layer numbers of decoder
layers, and replay their experts."""

from collections.abc import Callable
from typing import Any

from replay_patch.patching import Patch, Transaction, probe

_MODULE = "megatron.core.transformer.multi_token_prediction"
_BLOCK = f"{_MODULE}:MultiTokenPredictionBlock"


def _needed() -> tuple[bool, str]:
    has_blocks = probe.find(_BLOCK) is not None
    return has_blocks, f"this release has {'a' if has_blocks else 'no'} MultiTokenPredictionBlock"


def _apply(transaction: Transaction) -> None:
    transaction.wrap(probe.find(_BLOCK), "__init__", _init_numbering_routers)


def _init_numbering_routers(original: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        for depth, layer in enumerate(self.layers, start=1):
            for module in layer.modules():
                replay = getattr(module, "router_replay", None)
                if replay is not None:
                    replay.mtp_depth = depth

    return __init__


PATCH = Patch(
    name="mtp_depth",
    library="megatron",
    targets=(f"{_BLOCK}.__init__",),
    requires=_MODULE,
    relies_on=(f"{_BLOCK}._build_layers",),
    checks=("mtp-depth",),
    why=(
        "`layer_number` alone is no key: the routers of MTP blocks start again at 1 in 0.12 ... "
        "0.15 and from 0.17 on, so they alias those of the decoder."
    ),
    how="After the block is built, each router in `layers[i]` gets `mtp_depth = i + 1`.",
    upstream="none: the number is this plugin's own; Megatron's replay goes by build order",
    remove_when="router numbers are unique in every supported release",
    needed=_needed,
    apply=_apply,
    vital=True,
)
