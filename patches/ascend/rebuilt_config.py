"""Without this patch a config whose class MindSpeed has rebuilt cannot be pickled or replaced, and
a subclass that MindSpeed does not know cannot be built."""

import dataclasses
import functools
import inspect
import sys
import weakref
from collections.abc import Callable
from typing import Any

from replay_patch.megatron.ascend import is_of_mindspeed
from replay_patch.megatron.config import REPLAY_FIELDS
from replay_patch.patching import Patch, Transaction, probe
from replay_patch.patching.wrappers import chain

_MODULE = "megatron.core.transformer.transformer_config"
_ROOT = f"{_MODULE}:TransformerConfig"


def _needed() -> tuple[bool, str]:
    own = vars(probe.find(_ROOT))
    for name in ("__init__", "__post_init__"):
        if any(map(is_of_mindspeed, chain(own[name]))):
            return True, f"MindSpeed has wrapped TransformerConfig.{name}"
    return False, "a config is of the class that was called"


def _apply(transaction: Transaction) -> None:
    root = probe.find(_ROOT)
    transaction.wrap(root, "__post_init__", _completing_post_init)
    transaction.set(root, "__reduce_ex__", _reduce_ex)


def _completing_post_init(original: Callable[..., None]) -> Callable[..., None]:
    def __post_init__(self: Any) -> None:
        arguments = getattr(sys.modules.get("mindspeed.args_utils"), "get_full_args", None)
        if arguments is not None:  # 2.1 adds its arguments here, and to every config
            for name, value in vars(arguments()).items():
                # A replay flag that was not given is the default of the class.
                lacks = name not in vars(self) if name in REPLAY_FIELDS else not hasattr(self, name)
                if lacks:
                    setattr(self, name, value)
        original(self)
        if _is_rebuilt(type(self)):
            _complete(type(self))

    return __post_init__


_completed: "weakref.WeakSet[Any]" = weakref.WeakSet()


def _is_rebuilt(cls: Any) -> bool:
    """Whether MindSpeed made this class for one object: a dataclass named as its only base (as a
    trainer's may be; Megatron-Bridge's is), in no module, and without an argument of its own."""
    if cls in _completed:
        return True
    own = vars(cls).get("__dataclass_fields__")
    named_as_base = len(cls.__bases__) == 1 and cls.__name__ == cls.__bases__[0].__name__
    if own is None or not named_as_base or "<locals>" in cls.__qualname__:
        return False
    if getattr(sys.modules.get(cls.__module__), cls.__qualname__, None) is cls:
        return False
    return not any(own[name].init for name in inspect.get_annotations(cls) if name in own)


def _base(cls: Any) -> Any:
    while _is_rebuilt(cls):
        cls = cls.__bases__[0]
    return cls


def _added(cls: Any) -> list[Any]:
    """The fields of a rebuilt class that its base has not."""
    known = _base(cls).__dataclass_fields__
    return [field for field in dataclasses.fields(cls) if field.name not in known]


def _complete(cls: Any) -> None:
    """MindSpeed's fields become arguments of a rebuilt class, so that `replace` copies them."""
    _completed.add(cls)
    extra = [field for field in _added(cls) if not field.init]
    if not extra:
        return
    for field in extra:
        field.init = field.kw_only = True
    names, original = [field.name for field in extra], cls.__init__

    @functools.wraps(original, updated=())
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        self.__dict__.update({name: kwargs.pop(name) for name in names if name in kwargs})
        original(self, *args, **kwargs)

    cls.__init__ = __init__


def _reduce_ex(self: Any, protocol: Any) -> Any:
    cls: Any = type(self)
    if not _is_rebuilt(cls) or cls.__reduce__ is not object.__reduce__:
        return object.__reduce_ex__(self, protocol)
    extra = tuple(field.name for field in _added(cls))
    state = getattr(self, "__getstate__", None)  # every object has one from Python 3.11 on
    return _restored, (_base(cls), extra), self.__dict__ if state is None else state()


def _restored(base: Any, extra: tuple[str, ...]) -> Any:
    """An object as MindSpeed makes it, without a value yet."""
    fields = [(name, Any, dataclasses.field(init=False)) for name in extra]
    cls: Any = dataclasses.make_dataclass(base.__name__, fields, bases=(base,))
    _complete(cls)
    return object.__new__(cls)


PATCH = Patch(
    name="rebuilt_config",
    library="ascend",
    targets=(f"{_ROOT}.__post_init__", f"{_ROOT}.__reduce_ex__"),
    modules=(_MODULE,),
    requires=_MODULE,
    after=("config_fields",),
    checks=("config-fields", "config-mla", "config-subclass"),
    why=(
        "MindSpeed makes a class for every config object. Such an object cannot be pickled, nor, "
        "from 2.2 on, given to `dataclasses.replace`; and a subclass of the config that MindSpeed "
        "has not wrapped (a trainer's provider; with core_r0.17.0 also `MLATransformerConfig`) "
        "cannot be built, because its validation reads MindSpeed's arguments from the config."
    ),
    how=(
        "Around `TransformerConfig.__post_init__`: before it a config gets those of MindSpeed's "
        "arguments that it lacks, as MindSpeed's own wrapper of `__init__` gives them; after it "
        "the fields that a rebuilt class has more than its base become keyword arguments. "
        "`__reduce_ex__` makes such a class again when a config is unpickled or copied. Without "
        "MindSpeed's wrappers nothing is changed."
    ),
    upstream="none known: every branch in docs/mindspeed.md makes such classes",
    remove_when="no supported MindSpeed rebuilds the class, or it wraps subclasses, too",
    needed=_needed,
    apply=_apply,
)
