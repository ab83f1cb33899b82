"""Without this patch layers run without the padding mask under recompute by "block" on 0.16 and
0.17: those that are not recomputed, and all with MindSpeed's own recompute for 0.16."""

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from replay_patch.patching import Patch, Transaction, probe
from replay_patch.patching.rebinding import Instead

_MODULE = "megatron.core.transformer.transformer_block"
_BLOCK = f"{_MODULE}:TransformerBlock"
_RECOMPUTE = "_checkpointed_forward"


def _needed() -> tuple[bool, str]:
    function = probe.find(f"{_BLOCK}.{_RECOMPUTE}")
    if function is None or "padding_mask" not in probe.parameters(f"{_BLOCK}.{_RECOMPUTE}"):
        return False, "this release's TransformerBlock hands on no padding_mask in a recompute"
    masked = _layer_gets_mask(function)
    return not masked, f"a layer that is not recomputed is given {'the' if masked else 'no'} mask"


class _BlockConfig:
    """Every other field is None; MindSpeed's function reads more of them than Megatron's."""

    recompute_method, recompute_num_layers = "block", 0

    def __getattr__(self, name: str) -> None:
        return None


def _layer_gets_mask(function: Any) -> bool:
    """Whether a block hands its mask to a layer that is not recomputed."""
    import torch

    masks: list[Any] = []

    def layer(*, hidden_states: Any, padding_mask: Any = None, **_: Any) -> Any:
        masks.append(padding_mask)
        return hidden_states, None

    block = SimpleNamespace(
        config=_BlockConfig(),
        num_layers_per_pipeline_rank=1,
        _get_layer=lambda _: layer,
    )
    parameters = list(inspect.signature(function).parameters.values())[1:]
    arguments: dict[str, Any] = {p.name: None for p in parameters if p.default is p.empty}
    mask = torch.zeros(1, 1, dtype=torch.bool)
    arguments |= {"hidden_states": torch.zeros(1, 1, 1), "padding_mask": mask}
    function(block, **arguments)
    return masks[0] is mask


def _apply(transaction: Transaction) -> None:
    transaction.wrap(probe.find(_BLOCK), _RECOMPUTE, _masked_checkpointed_forward)


class _MaskedLayer(Instead):
    """A layer that, called without a mask, takes the block's."""

    def __call__(self, *args: Any, padding_mask: Any = None, **kwargs: Any) -> Any:
        mask = self.mask if padding_mask is None else padding_mask
        return self._original(*args, padding_mask=mask, **kwargs)


def _masked_checkpointed_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def _checkpointed_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        mask = signature.bind_partial(self, *args, **kwargs).arguments.get("padding_mask")
        if mask is None:
            return original(self, *args, **kwargs)
        masked = Instead(
            self, _get_layer=lambda number: _MaskedLayer(self._get_layer(number), mask=mask)
        )
        return original(masked, *args, **kwargs)

    return _checkpointed_forward


PATCH = Patch(
    name="block_recompute_mask",
    library="megatron",
    targets=(f"{_BLOCK}.{_RECOMPUTE}",),
    requires=_MODULE,
    checks=("block-recompute", "npu-mask"),
    why=(
        'With full recompute and `recompute_method="block"` the layers beyond '
        "`recompute_num_layers` run without the padding mask: their routers count padding, and "
        "nothing says so. MindSpeed's replacement for 0.16 takes the mask and gives it to no layer."
    ),
    how=(
        "Where a call with a stand-in for the block shows it, the release's own code runs with "
        "layers that have the block's mask unless they are given one."
    ),
    upstream="Megatron-LM 0.18.0 gives them the mask",
    remove_when="0.17 is no longer supported",
    needed=_needed,
    apply=_apply,
)
