"""What a patch relies on in one target, as plain JSON values that every Python makes the same.

It is read from the source and not from the bytecode, which moves with Python, and leaves out
comments, docstrings, annotations and layout. A *fingerprint* has a `kind` and, depending on it:
* `parameters`: `x`, `x=None`, `*args`, `x=None, keyword only`, in the order of the signature,
* `names`: what the code uses. Globals and parameters are written out (`torch.topk`,
  `self.config.num_moe_experts`), attributes of anything else are `.gather`, arguments passed by
  name are `fused=`,
* `code`: a hash of decorators and body,
* `bases`, `methods` (public ones and `__init__`) and `fields` of a class, `classes` of a module.
"""

import ast
import builtins
import dataclasses
import enum
import functools
import hashlib
import importlib
import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from types import FunctionType, ModuleType
from typing import Any

from replay_patch.patching import probe
from replay_patch.patching.patch import Patch

Fingerprint = dict[str, Any]

ABSENT, UNSEEN = "absent", "unseen"
"""Kinds of what is not there, and of what cannot be looked at, which has a `reason`, too."""

# A config class has hundreds of fields; these are those that replay could be concerned with.
_FIELDS = re.compile(
    r"rout|replay|cuda_graph|aux_loss|capacity|token_drop|num_moe|moe_layer|mtp_num"
)


def of_target(target: str) -> Fingerprint:
    """The fingerprint of the object at `module:qualname` or `module:`, which is imported. Never
    raises: what is not there has the kind "absent", what cannot be looked at "unseen"."""
    module, _, path = target.partition(":")
    problem = _import_problem(module)
    if problem is not None:
        return problem
    try:
        live_object = probe.find(target) if path else sys.modules[module]
        return {"kind": ABSENT} if live_object is None else fingerprint(live_object)
    except Exception as error:  # noqa: BLE001 - a stranger's object may answer in any way
        return {"kind": UNSEEN, "reason": f"{target}: {type(error).__name__}: {error}"}


def of_need(patch: Patch) -> Fingerprint:
    """Whether the patch is needed here, as the kind: "needed", "not needed", or an error's name."""
    problems = [p for p in map(_import_problem, patch.modules) if p and p["kind"] == UNSEEN]
    if problems:
        return problems[0]
    try:
        needed, reason = patch.needed()
    except Exception as error:  # noqa: BLE001 - the ledger catches all, too
        return {"kind": type(error).__name__, "reason": f"{error}"}
    return {"kind": "needed" if needed else "not needed", "reason": reason}


def fingerprint(thing: Any) -> Fingerprint:
    """Describe a module, class, function or method, as it stands in its class (a staticmethod stays
    one); of a wrapped one the innermost."""
    if isinstance(thing, ModuleType):
        own = [v for v in vars(thing).values() if inspect.isclass(v)]
        names = sorted(v.__name__ for v in own if v.__module__ == thing.__name__)
        return {"kind": "module", "classes": names}
    if inspect.isclass(thing):
        return _of_class(thing)
    function = _innermost(thing)
    kind = type(thing).__name__ if hasattr(thing, "__get__") else type(function).__name__
    if not isinstance(function, FunctionType):
        return {"kind": kind}
    names, code = _of_code(function)
    return {"kind": kind, "parameters": _parameters(function), "names": names, "code": code}


@functools.cache  # what fails to be imported is slow to fail, and has many targets
def _import_problem(module: str) -> Fingerprint | None:
    """Import a module; None if that worked."""
    try:
        importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what the user must know
        missing = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{module}.".startswith(f"{missing}."):
            return {"kind": ABSENT, "reason": f"there is no module {missing}"}
        return {"kind": UNSEEN, "reason": f"{type(error).__name__}: {error}"}
    return None


def _innermost(thing: Any) -> Any:
    return inspect.unwrap(getattr(thing, "__func__", None) or getattr(thing, "fget", None) or thing)


def _of_class(cls: type) -> Fingerprint:
    methods = []
    for name, value in vars(cls).items():
        function = _innermost(value)
        public = not name.startswith("_") or name == "__init__"
        # A dataclass has methods that nobody wrote.
        if (
            public
            and isinstance(function, FunctionType)
            and "<" not in function.__code__.co_filename
        ):
            methods.append(f"{name}({', '.join(_parameters(function))})")
    fields = []
    if issubclass(cls, enum.Enum):
        fields = [f"{member.name}={_text(member.value)}" for member in cls]
    elif dataclasses.is_dataclass(cls):
        own = inspect.get_annotations(cls)
        fields = [
            f.name if f.default is dataclasses.MISSING else f"{f.name}={_text(f.default)}"
            for f in dataclasses.fields(cls)
            if f.name in own and _FIELDS.search(f.name)
        ]
    bases = [base.__name__ for base in cls.__bases__ if base is not object]
    return {"kind": "class", "bases": bases, "methods": sorted(methods), "fields": sorted(fields)}


def _parameters(function: FunctionType) -> list[str]:
    out = []
    for p in inspect.signature(function).parameters.values():
        text = p.name if p.default is p.empty else f"{p.name}={_text(p.default)}"
        before, after = _HOW_PASSED.get(p.kind.name, ("", ""))
        out.append(before + text + after)
    return out


_HOW_PASSED = {
    "VAR_POSITIONAL": ("*", ""),
    "VAR_KEYWORD": ("**", ""),
    "KEYWORD_ONLY": ("", ", keyword only"),
    "POSITIONAL_ONLY": ("", ", positional only"),
}


def _text(value: Any) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


# Fields of syntax trees that are no code, or that only some versions of Python have.
_NO_CODE = {"annotation", "returns", "type_comment", "type_params", "ctx", "kind"}


def _of_code(function: FunctionType) -> tuple[list[str], str]:
    """The names that the code uses, and its hash."""
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        return [], "no source"
    tree = ast.parse("if True:\n" + source if source[0].isspace() else source)
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    definition: Any = next(n for n in ast.walk(tree) if isinstance(n, kinds))
    code = repr([_plain(definition.decorator_list), _plain(definition.body)])
    return sorted(_names(definition)), hashlib.sha256(code.encode()).hexdigest()[:12]


def _plain(node: Any) -> Any:
    if isinstance(node, list):
        return [_plain(n) for n in node if not _is_docstring(n)]
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = [(k, v) for k, v in ast.iter_fields(node) if k not in _NO_CODE and v not in (None, [])]
    return [type(node).__name__, *((k, _plain(v)) for k, v in fields)]


def _is_docstring(node: Any) -> bool:
    value = getattr(node, "value", None) if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def _names(definition: Any) -> set[str]:
    parameters = {a.arg for a in ast.walk(definition.args) if isinstance(a, ast.arg)}
    local: set[str] = set(dir(builtins))
    for node in ast.walk(definition):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            local.add(node.id)
        elif isinstance(node, (ast.arg, ast.FunctionDef, ast.ClassDef, ast.ExceptHandler)):
            local.add(getattr(node, "arg", None) or getattr(node, "name", None) or "")
    local -= parameters

    def used(node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.Attribute):
            chain = ast.unparse(node)
            root = chain.partition(".")[0]
            if re.fullmatch(r"[\w.]+", chain) and root not in local:
                yield chain
                return
            yield f".{node.attr}"
        elif isinstance(node, ast.Name) and node.id not in local | parameters:
            yield node.id
        elif isinstance(node, ast.keyword) and node.arg:
            yield f"{node.arg}="
        for key, value in ast.iter_fields(node):
            if key not in _NO_CODE:
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        yield from used(child)

    return set(used(definition))


_SHOWN = 8  # names in one list

# Part of a fingerprint -> what is said when an entry of it is new, gone, different.
_PARTS = {
    "parameters": ("takes a new parameter {}", "no longer takes {}", "takes {}, not {}"),
    "bases": ("derives from {}", "no longer derives from {}", ""),
    "classes": ("has a new class {}", "no longer has the class {}", ""),
    "methods": ("has a new method {}", "no longer has the method {}", "has the method {}, not {}"),
    "fields": ("has a new field {}", "no longer has the field {}", "has the field {}, not {}"),
    "names": ("now uses {}", "no longer uses {}", ""),
}


def differences(old: Fingerprint, new: Fingerprint, nearest: str) -> list[str]:
    """What differs, in words that go on from the name of the target."""
    if new["kind"] == ABSENT:
        return ["is gone" + (f": {new['reason']}" if "reason" in new else "")]
    if old["kind"] == ABSENT:
        return [f"is there; {nearest} does not have it"]
    if new["kind"] != old["kind"]:
        return [f"is a {new['kind']}, not a {old['kind']}"]
    words = []
    for part, (fresh, gone, other) in _PARTS.items():
        before = {_name(entry): entry for entry in old.get(part, [])}
        now = {_name(entry): entry for entry in new.get(part, [])}
        changed = [
            other.format(_shown([now[n]]), _shown([before[n]]))
            for n in now
            if n in before and now[n] != before[n]
        ]
        added = [now[n] for n in now if n not in before]
        removed = [n for n in before if n not in now]
        sentences = [fresh.format(_shown(added))] * bool(added)
        sentences += [gone.format(_shown(removed))] * bool(removed) + changed
        words += [f"its code {s}" for s in sentences] if part == "names" else sentences
        if not sentences and old.get(part) != new.get(part):
            words.append(f"has its {part} in another order: {', '.join(new[part])}")
    if new.get("code") != old.get("code") and new["names"] == old["names"]:
        words.append("its code has changed (" + "same signature, " * (not words) + "same names)")
    return words


def _name(entry: str) -> str:
    """`x` of `x=None`, `x(self)` and `x, keyword only`; names of code stay as they are."""
    return re.split(r"(?<=\w)[(,]|(?<=\w)=(?=.)", entry)[0]


def _shown(entries: Sequence[str]) -> str:
    shown = [re.sub(r"^(\w+)=(.+)$", r"`\1` (default \2)", entry) for entry in entries]
    shown = [entry if entry.startswith("`") else f"`{entry}`" for entry in shown]
    more = len(shown) - _SHOWN
    return ", ".join(shown[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
