"""Imitated: layers in `config.noop_layers`, numbered from 0, do nothing and have no `mlp`."""

from typing import Any

from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlock

_of_megatron = TransformerBlock._build_layers  # another name: else the manager changes it, too


class NoopTransformerLayer(MegatronModule):
    """It hands on what it is given."""

    def __init__(self, layer_number: int) -> None:
        super().__init__(None)
        self.layer_number = layer_number

    def forward(self, hidden_states: Any, context: Any = None, **_: Any) -> Any:
        return hidden_states.clone(), context


def mindspeed_build_layers(transformer: Any) -> None:
    """A replacement: builds the others as Megatron does."""
    _of_megatron(transformer)
    for place, layer in enumerate(transformer.layers):
        if layer.layer_number - 1 in (transformer.config.noop_layers or ()):
            transformer.layers[place] = NoopTransformerLayer(layer.layer_number)
