"""What is really installed here, asked of the live objects and never of a version string.

Imports nothing and keeps nothing. A *target* is `module:qualname`.
"""

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator
from types import CodeType
from typing import Any


def find(target: str) -> Any:
    """The object at a target, or None if this release has none or it is not imported.

    For a class attribute it is what stands in the class (a staticmethod stays one).
    """
    name, _, path = target.partition(":")
    module = sys.modules.get(name)
    if module is None:
        return None
    import wrapt  # here: a broken one must not keep status() and the doctor from speaking

    try:
        return wrapt.resolve_path(module, path)[2]
    except AttributeError:
        return None


def parameters(target: str) -> frozenset[str]:
    """Names of the parameters of the callable at a target; empty if there is none."""
    found = find(target)
    if found is None:
        return frozenset()
    try:
        return frozenset(inspect.signature(found).parameters)
    except (TypeError, ValueError):
        return frozenset()


def names_used(target: str) -> frozenset[str]:
    """Global names, attributes, local names and parameters in the code of the function at a target,
    and of the functions in it. Empty if there is no Python function.
    """
    return frozenset(
        name
        for code in _codes(find(target))
        for name in (*code.co_names, *code.co_varnames, *code.co_cellvars, *code.co_freevars)
    )


def constants(target: str) -> frozenset[Any]:
    """The constants in the code of the function at a target, as `names_used` reads it; docstrings
    are among them."""
    return frozenset(
        constant
        for code in _codes(find(target))
        for constant in code.co_consts
        if not isinstance(constant, CodeType)
    )


def source(target: str) -> str:
    """The text of the function at a target, without comments and docstrings, laid out anew; ""
    where there is none to be had."""
    try:
        text = textwrap.dedent(inspect.getsource(_innermost(find(target))))
        tree = ast.parse(text)
    except (OSError, TypeError, SyntaxError):
        return ""
    for node in ast.walk(tree):
        definition = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        if definition and ast.get_docstring(node, clean=False) is not None:  # type: ignore[arg-type]
            node.body = node.body[1:] or [ast.Pass()]  # type: ignore[attr-defined]
    return ast.unparse(tree)


def _innermost(found: Any) -> Any:
    return inspect.unwrap(getattr(found, "__func__", found))


def _codes(found: Any) -> Iterator[CodeType]:
    """The code object of a function, and those of the functions in it."""
    code = getattr(_innermost(found), "__code__", None)
    waiting = [code] if isinstance(code, CodeType) else []
    while waiting:
        code = waiting.pop()
        yield code
        waiting += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
