"""The layers, under the names by which Megatron and the trainers take them."""

from transformer_engine.pytorch import distributed, fp8, ops
from transformer_engine.pytorch.attention import DotProductAttention
from transformer_engine.pytorch.linear import GroupedLinear, LayerNormLinear, Linear
from transformer_engine.pytorch.norm import LayerNorm, RMSNorm

__all__ = [
    "DotProductAttention",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "Linear",
    "RMSNorm",
    "TransformerLayer",
    "distributed",
    "fp8",
    "ops",
]


class TransformerLayer:
    """Megatron-Bridge derives a class from it."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise NotImplementedError("the Transformer Engine stand-in has no whole layer")
