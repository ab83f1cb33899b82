"""Functions around functions: what is wrapped, by whose code, and where it is held."""

import functools
from collections.abc import Iterator
from typing import Any

from replay_patch.patching.rebinding import content

ABSENT: Any = object()
"""Stands for an attribute that is not there."""


def chain(function: Any) -> Iterator[Any]:
    """A function and what it wraps (`__wrapped__`), outermost first, each once."""
    seen: set[int] = set()  # a chain of strangers may be a ring
    while function is not ABSENT and id(function) not in seen:
        seen.add(id(function))
        yield function
        function = getattr(function, "__wrapped__", ABSENT)


def module_of(function: Any) -> str:
    """The module whose code is called. (functools.wraps copies `__module__` from another.)"""
    while isinstance(function, functools.partial):
        function = function.func
    module = getattr(function, "__globals__", {"__name__": type(function).__module__})
    return str(module.get("__name__", ""))


def cells_with(function: Any, value: Any) -> list[Any]:
    """The cells of its closure that hold the value."""
    return [c for c in getattr(function, "__closure__", None) or () if content(c) is value]


def reaches(current: Any, ours: Any) -> bool:
    function = getattr(ours, "__func__", ours)  # strangers wrap what is in a staticmethod
    return any(each is ours or each is function for each in chain(current))
