"""`--moe-fb-overlap`: the getter is wrapped, and gives a schedule of MindSpeed's."""

import functools
from collections.abc import Callable
from typing import Any


def get_forward_backward_func_vpp_overlap_wrapper(fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        schedule = fn(*args, **kwargs)

        def forward_backward_overlaping(*args: Any, **kwargs: Any) -> Any:
            return schedule(*args, **kwargs)

        return forward_backward_overlaping

    return wrapper
