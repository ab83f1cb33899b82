"""Run somebody's function with some of its global names bound differently, for one call.

The function is neither copied as text nor re-implemented, its module is not changed, and other
threads see nothing. Functions that it defines inside see the same names.
"""

import functools
import types
from collections.abc import Callable
from typing import Any


def with_globals(function: Any, names: dict[str, Any]) -> Callable[..., Any]:
    """`function` with `names` in place of its globals of the same names.

    Wrappers (along `__wrapped__`) are kept, and run around it. The other globals are taken as they
    are now: make another one when `globals_of(function)` has changed. Raises LookupError for no
    Python function, or a wrapper that holds what it wraps neither in its closure nor in a global.
    """
    if not isinstance(function, types.FunctionType):
        raise LookupError(f"{function!r} is no plain Python function")
    inner = getattr(function, "__wrapped__", None)
    if inner is None:
        return _clone(function, {**function.__globals__, **names}, function.__closure__)
    inner_clone = with_globals(inner, names)
    cells = function.__closure__ or ()
    closure = tuple(types.CellType(inner_clone) if content(c) is inner else c for c in cells)
    own_globals = function.__globals__
    by_name = {n: inner_clone for n in function.__code__.co_names if own_globals.get(n) is inner}
    if closure == cells and not by_name:
        where = f"{function.__module__}.{function.__qualname__}"
        raise LookupError(f"{where} wraps a function that it does not hold")
    return _clone(function, {**own_globals, **by_name}, closure)


class Instead:
    """Answers as another object does, but for some attributes; that object is left as it is."""

    def __init__(self, original: Any, **attributes: Any) -> None:
        vars(self).update(attributes, _original=original)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def globals_of(function: Any) -> list[Any]:
    """The values of all global names that `function`, and what it wraps, refer to now."""
    values: list[Any] = []
    while function is not None:
        values += map(function.__globals__.get, _names(function.__code__))
        function = getattr(function, "__wrapped__", None)
    return values


@functools.cache
def _names(code: types.CodeType) -> tuple[str, ...]:
    inner = [_names(const) for const in code.co_consts if isinstance(const, types.CodeType)]
    return tuple(dict.fromkeys([*code.co_names, *(name for names in inner for name in names)]))


def _clone(function: Any, names: dict[str, Any], closure: Any) -> Callable[..., Any]:
    clone = types.FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, closure
    )
    clone.__kwdefaults__ = function.__kwdefaults__
    return clone


def content(cell: Any) -> Any:
    """What a cell of a closure holds; None if that is not bound yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None
