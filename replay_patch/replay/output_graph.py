"""What of a model's output leads into its autograd graph."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor


def graph_nodes(output: Any) -> Iterator[Any]:
    """The graph's nodes at the output, and those just below.

    Both, because an in-place operation on a view (`logits.div_(temperature)`) gives it a new node
    in the place of the old one. Not AccumulateGrad, which may live as long as the parameter.
    """
    for tensor in _tensors(output, 0):
        top = tensor.grad_fn
        if top is not None:
            for node in (top, *(below for below, _ in top.next_functions)):
                if node is not None and not hasattr(node, "variable"):
                    yield node


def _tensors(value: Any, depth: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
        return
    parts: Any = ()
    if depth > 8:  # no model output is that deep; a structure that holds itself is
        return
    if isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, (list, tuple)):
        parts = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    for part in parts:
        yield from _tensors(part, depth + 1)
