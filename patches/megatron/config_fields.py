"""Without this patch a config of Megatron's refuses the field with which trainers switch replay on,
or a subclass of it loses the value."""

import dataclasses
import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

from replay_patch.megatron.config import REPLAY_FIELDS, replay_enabled
from replay_patch.patching import REPLAYING, Patch, Transaction, activation, probe
from replay_patch.patching.wrappers import chain

_MODULE = "megatron.core.transformer.transformer_config"
_ROOT = f"{_MODULE}:TransformerConfig"

FIELDS = dict.fromkeys((*REPLAY_FIELDS, "moe_router_fusion"), False)
"""Name -> default. All are bool."""


def _needed() -> tuple[bool, str]:
    missing = _missing(probe.find(_ROOT))
    return bool(missing), f"TransformerConfig lacks {', '.join(missing) or 'none of the fields'}"


def _missing(cls: Any) -> list[str]:
    return [name for name in FIELDS if name not in cls.__dataclass_fields__]


def _apply(transaction: Transaction) -> None:
    root = probe.find(_ROOT)
    # All questions before the first change: classes may share their fields.
    missing = {cls: _missing(cls) for cls in _tree(root)}
    for cls, names in missing.items():
        own = vars(cls)
        if "__dataclass_fields__" in own:
            where = f"{cls.__module__}.{cls.__qualname__}.__dataclass_fields__"
            for name in names:
                transaction.item(own["__dataclass_fields__"], name, _field(name), where)
        if "__init__" in own:
            lacking = [name for name in names if name not in _parameters(own["__init__"])]
            if lacking:
                # Innermost: MindSpeed's wrapper hands on what the signature has, its own arguments
                # included, and a `repatch` may have put the names among these.
                accepting = functools.partial(_init_accepting, names=lacking)
                transaction.wrap_innermost(cls, "__init__", accepting)
    for name in missing[root]:
        # A subclass made later inherits fields and default by itself. typing.get_type_hints and
        # Megatron's argument factory read the annotation.
        transaction.set(root, name, FIELDS[name])
        transaction.item(root.__annotations__, name, bool, f"{_ROOT}.__annotations__")


_names_taken: "weakref.WeakKeyDictionary[Any, list[str]]" = weakref.WeakKeyDictionary()
"""Our `__init__` -> the names that it takes."""


def _parameters(init: Any) -> list[str]:
    """What the code takes by name; a `__signature__` may be somebody's edit (verl's)."""
    *wrappers, _ = chain(init)
    names = [name for wrapper in wrappers for name in _names_taken.get(wrapper, ())]
    return [*names, *probe.parameters_of_code(init)]


def _tree(cls: Any) -> list[Any]:
    """`cls` and all its subclasses, each once, parents first."""
    out: dict[Any, None] = {cls: None}
    for sub in cls.__subclasses__():
        out.update(dict.fromkeys(_tree(sub)))
    return list(out)


def _field(name: str) -> Any:
    """A `Field` as the dataclass decorator makes it."""
    field: Any = dataclasses.field(default=FIELDS[name], kw_only=True)
    field.name, field.type = name, bool
    field._field_type = dataclasses._FIELD  # type: ignore[attr-defined]
    return field


def _init_accepting(original: Callable[..., None], names: list[str]) -> Callable[..., None]:
    """`__init__` that takes `names`, too. MindSpeed hands on what this signature has."""
    wrapped = hasattr(original, "__wrapped__")

    @functools.wraps(original, updated=())
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        values = {name: kwargs.pop(name) for name in names if name in kwargs}
        self.__dict__.update(values)  # before: __post_init__ may look at them, and change them
        original(self, *args, **kwargs)
        if wrapped:  # a stranger's wrapper may set them from arguments that it did not get
            self.__dict__.update(values)
        if replay_enabled(self):
            activation.require_replay(f"{type(self).__name__} with routing replay on")

    signature = inspect.signature(original)
    kept = [p for p in signature.parameters.values() if p.name not in names]
    catch_all = [p for p in kept if p.kind is p.VAR_KEYWORD]
    added = [
        inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=FIELDS[n], annotation=bool)
        for n in names
    ]
    parameters = [p for p in kept if p not in catch_all] + added + catch_all
    __init__.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    _names_taken[__init__] = names
    return __init__


PATCH = Patch(
    name="config_fields",
    library="megatron",
    targets=(_ROOT, f"{_MODULE}:MLATransformerConfig"),
    requires=_MODULE,
    checks=(REPLAYING, "config-names", "config-subclass"),
    why=(
        "`enable_routing_replay` (what trainers set) is in no release, `moe_enable_routing_replay` "
        "only from 0.16 and `moe_router_fusion` only from 0.14. Config subclasses have an "
        "`__init__` of their own, so a patch of `TransformerConfig.__init__` alone misses "
        "DeepSeek-type models; a bare class attribute makes MindSpeed drop the user's True."
    ),
    how=(
        "A real keyword-only `Field` in `__dataclass_fields__` of the root and of each dataclass "
        "subclass, the default as class attribute of the root, and each class's own `__init__` "
        "taking the names. Subclasses made later inherit all three. `__post_init__`, `__new__` and "
        "the metaclass are left alone."
    ),
    upstream="https://github.com/volcengine/verl/pull/5884",
    remove_when="no supported release lacks one of the fields and trainers use Megatron's name",
    needed=_needed,
    apply=_apply,
)
