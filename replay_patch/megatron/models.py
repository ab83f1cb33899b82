"""What is known of Megatron's models: what wraps them, and whether they take a padding mask."""

import inspect
from typing import Any

import torch


def unwrap(model: Any) -> Any:
    """The model inside of DDP, Float16Module and their like."""
    while isinstance(inner := getattr(model, "module", None), torch.nn.Module):
        model = inner
    return model


def takes_mask(chunk: Any) -> bool:
    """Whether this Megatron's own model takes `padding_mask` (from 0.16 on)."""
    return "padding_mask" in inspect.signature(chunk.forward).parameters
