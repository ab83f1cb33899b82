"""What is really installed here, asked of the live objects and never of a version string.

Imports nothing and keeps nothing. A *target* is `module:qualname`. What reads a function also takes
the function itself: some have no target of their own.
"""

import ast
import dis
import inspect
import sys
import textwrap
from collections.abc import Iterator
from types import CodeType
from typing import Any

from replay_patch.patching.wrappers import ABSENT, chain


def find(target: str) -> Any:
    """The object at a target, or None if this release has none or it is not imported.
    Of a class attribute, what stands in the class (a staticmethod stays one); of an actor of
    Ray's, the class that Ray runs, not Ray's object around that."""
    module, _, path = target.partition(":")
    value: Any = sys.modules.get(module)
    for name in path.split(".") if value is not None else ():
        value = _attribute(value, name)
        if value is ABSENT:
            return None
        metadata = getattr(value, "__ray_metadata__", None)
        value = getattr(metadata, "modified_class", value)
    return value


def unwrapped(target: Any) -> Any:
    """The function at a target without the wrappers (`__wrapped__`) around it."""
    value = find(target) if isinstance(target, str) else target
    *_, innermost = chain(getattr(value, "__func__", value))
    return innermost


def parameters(target: Any) -> frozenset[str]:
    """Names in the signature of the callable at a target; empty if there is none."""
    value = find(target) if isinstance(target, str) else target
    try:
        return frozenset(inspect.signature(value).parameters)
    except (TypeError, ValueError):
        return frozenset()


def parameters_of_code(target: Any) -> tuple[str, ...]:
    """What the code of the function at a target takes by name: a signature may be somebody's
    edit. Empty if there is no Python function."""
    code = getattr(unwrapped(target), "__code__", None)
    if not isinstance(code, CodeType):
        return ()
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def names_used(target: Any) -> frozenset[str]:
    """Globals, attributes, locals and parameters in the code of the function at a target, and of
    the functions in it. Empty if there is no Python function."""
    return frozenset(
        name
        for code in _codes(target)
        for name in (*code.co_names, *code.co_varnames, *code.co_cellvars, *code.co_freevars)
    )


def globals_used(target: Any) -> frozenset[str]:
    """Those of `names_used` that are looked up in the module: what `with_globals` can replace."""
    return frozenset(
        instruction.argval
        for code in _codes(target)
        for instruction in dis.get_instructions(code)
        if instruction.opname == "LOAD_GLOBAL"
    )


def constants(target: Any) -> frozenset[Any]:
    """The constants in the code that `names_used` reads, docstrings among them."""
    return frozenset(
        constant
        for code in _codes(target)
        for constant in code.co_consts
        if not isinstance(constant, CodeType)
    )


def source(target: Any) -> str:
    """The text of the function at a target, without comments and docstrings, laid out anew; ""
    where there is none to be had."""
    try:
        text = textwrap.dedent(inspect.getsource(unwrapped(target)))
        tree = ast.parse(text)
    except (OSError, TypeError, SyntaxError):
        return ""
    for node in ast.walk(tree):
        definition = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        if definition and ast.get_docstring(node, clean=False) is not None:  # type: ignore[arg-type]
            node.body = node.body[1:] or [ast.Pass()]  # type: ignore[attr-defined]
    return ast.unparse(tree)


def _attribute(owner: Any, name: str) -> Any:
    if inspect.isclass(owner):
        for cls in owner.__mro__:
            if name in vars(cls):
                return vars(cls)[name]
    return getattr(owner, name, ABSENT)


def _codes(target: Any) -> Iterator[CodeType]:
    """The code object of a function, and those of the functions in it."""
    code = getattr(unwrapped(target), "__code__", None)
    waiting = [code] if isinstance(code, CodeType) else []
    while waiting:
        code = waiting.pop()
        yield code
        waiting += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
