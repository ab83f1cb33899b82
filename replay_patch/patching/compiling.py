"""What torch.compile must not look into."""

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from replay_patch.patching.import_hooks import when_imported

_Function = TypeVar("_Function", bound=Callable[..., Any])


def opaque(function: _Function) -> _Function:
    """Keep `function` out of torch.compile's graphs, without importing dynamo.
    Its Python state changes from call to call: dynamo would guard on it and recompile each time."""
    holder: list[Callable[..., Any]] = [function]

    def disable() -> None:
        holder[0] = sys.modules["torch._dynamo"].disable(function)

    when_imported("torch._dynamo", disable)

    @functools.wraps(function, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        if _is_compiling():
            return holder[0](*args, **kwargs)
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]


# torch < 2.1 has no such function, and no compiled routers either.
_is_compiling = getattr(getattr(torch, "compiler", None), "is_compiling", lambda: False)
