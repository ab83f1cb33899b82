"""Which forward is this a recompute of? Autograd knows.

Every node of an autograd graph carries a sequence number, which rises along a thread. So the nodes
of one forward have the numbers of a range, and a checkpoint that runs a part of it again does so
while one of these nodes is running. Right for reentrant and non-reentrant checkpoints, also when
the backward runs on a device's thread.

A "forward" here is any object that stands for one: it lives in the metadata of its graph's output
(`anchor`), and dies with it.
"""

import dataclasses
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Generic, NoReturn, TypeVar

import torch
from torch import Tensor

from replay_patch.refusals import refuse

# Private, and in every torch from 2.1 on; where one is missing, recompute is refused.
_backward_pass: Any = getattr(torch._C, "_current_graph_task_id", None)
_current_node: Any = getattr(torch._C, "_current_autograd_node", None)
_next_number: Any = getattr(torch.autograd, "_get_sequence_nr", None)

KNOWS = None not in (_backward_pass, _current_node, _next_number)
"""Whether this torch can tell a recompute."""

_ANCHOR = "replay_patch"

_REMEMBERED = 256
"""Forwards whose range is kept although they are gone, to refuse what should find them."""

_Forward = TypeVar("_Forward")


class Span(Generic[_Forward]):
    """The sequence numbers of the nodes of one forward, which begins now: from `start` up to `end`,
    the first after them (None while the forward runs). `forward` is a weak reference."""

    __slots__ = ("end", "forward", "start")

    def __init__(self, forward: _Forward) -> None:
        self.start, self.forward = next_number(), weakref.ref(forward)
        self.end: int | None = None

    def close(self) -> None:
        """The forward is over. Only the first call counts."""
        if self.end is None:
            self.end = next_number()

    def holds(self, number: int) -> bool:
        """Whether a node with this sequence number belongs to the forward."""
        return self.start <= number and (self.end is None or number < self.end)


class Forwards(Generic[_Forward]):
    """The forwards of one model, told apart by the nodes of their graphs."""

    def __init__(self) -> None:
        self.spans: list[Span[_Forward]] = []  # in the order in which they began

    def open(self, forward: _Forward) -> Span[_Forward]:
        """A forward begins; it is over when its span is closed."""
        older, latest = self.spans[:-_REMEMBERED], self.spans[-_REMEMBERED:]
        span = Span(forward)
        self.spans = [*(s for s in older if s.forward() is not None), *latest, span]
        return span

    def find(self, number: int) -> Span[_Forward] | None:
        """The forward, the innermost of several, that the node with this number belongs to."""
        for span in reversed(self.spans):
            if span.holds(number):
                return span
        return None

    def living(self) -> list[_Forward]:
        """The forwards whose graph lives."""
        return [forward for span in self.spans if (forward := span.forward()) is not None]

    def clear(self) -> None:
        """Forget all of them."""
        self.spans = []


def anchor(forward: Any, output: Any) -> bool:
    """Keep `forward` alive as long as the graph of its output; False if there is no graph."""
    anchored = False
    for node in _graph_nodes(output):
        forwards = node.metadata.setdefault(_ANCHOR, [])
        if forward not in forwards:
            forwards.append(forward)
        anchored = True
    return anchored


def in_backward() -> bool:
    """Whether this code runs inside a backward pass."""
    return backward_pass() != -1


def backward_pass() -> int:
    """Which backward pass this code runs inside of; -1 for none."""
    return int(_backward_pass()) if KNOWS else -1


def next_number() -> int:
    """The sequence number of this thread's next node."""
    return int(_next_number())


def current_number() -> int:
    """The sequence number of the node that the running backward pass is at."""
    return int(_current_node()._sequence_nr())


def refuse_torch(what: str) -> NoReturn:
    """Raise RouteError: this torch cannot tell a recompute, and `what` needs it to."""
    refuse(
        f"{what}, and torch {torch.__version__} does not say which forward a recompute belongs to",
        "torch 2.1 or later, or no recompute",
    )


def refuse_output(which: str) -> NoReturn:
    """Raise RouteError: recompute is configured, and nothing in an output can be followed."""
    refuse(
        f"recompute is configured, and the output {which} has no tensor with a gradient that would "
        "tell its recompute from others",
        "a tensor, or a mapping, list, tuple or dataclass with tensors",
    )


# --- what of a model's output leads into its graph -----------------------------------------------


def _graph_nodes(output: Any) -> Iterator[Any]:
    """The nodes of the autograd graph at a model's output, and those just below.
    Both, because an in-place operation on a view (`logits.div_(temperature)`) gives it a new node
    in the place of the old one. Not AccumulateGrad, which may live as long as the parameter."""
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
