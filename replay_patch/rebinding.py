"""Run somebody's function with some of its global names bound differently, for one call.

The function is neither copied as text nor re-implemented, its module is not changed, and other
threads see nothing. Functions that it defines inside see the same names.
"""

import types
from collections.abc import Callable
from typing import Any


def with_globals(function: Any, names: dict[str, Any]) -> Callable[..., Any]:
    """`function` with `names` in place of its globals of the same names.

    The other globals are taken as they are now: make one for each call.
    """
    clone = types.FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    clone.__kwdefaults__ = function.__kwdefaults__
    return clone
