"""`--recompute-in-advance`: checkpoints that the schedule recomputes; here they are Megatron's."""

import functools
from collections.abc import Callable
from typing import Any


def checkpoint_wrapper(fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def wrapper(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return fn(function, *args, **kwargs)

    return wrapper
