"""Configs: an argument that Megatron does not know becomes a field of a class made for one object,
unless the class has an attribute of that name. Then it is dropped."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

from ...args_utils import get_full_args


def transformer_config_init_wrapper(fn: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(fn)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        given = vars(get_full_args()) | kwargs
        known = inspect.signature(self.__class__).parameters
        new = {k: v for k, v in given.items() if k not in known and not hasattr(self, k)}
        fields = [(k, type(v), dataclasses.field(init=False)) for k, v in new.items()]
        self.__class__ = dataclasses.make_dataclass(
            type(self).__name__, fields, bases=(type(self),)
        )
        for key, value in new.items():
            setattr(self, key, value)
        fn(self, *args, **{k: v for k, v in given.items() if k in known})

    return wrapper


def transformer_config_post_init_wrapper(fn: Callable[..., None]) -> Callable[..., None]:
    """Validation by the features. A config of a class whose `__init__` is not wrapped lacks their
    arguments, and cannot be made. No-op layers become a set of numbers from 0."""

    @functools.wraps(fn)
    def wrapper(self: Any) -> None:
        fn(self)
        if self.moe_zero_memory_num_layers is not None:
            raise AssertionError("the stand-in has no moe_zero_memory_num_layers")
        noop_layers = getattr(self, "noop_layers", None)
        if isinstance(noop_layers, str):
            self.noop_layers = {int(number) for number in noop_layers.split(",")}

    return wrapper


@classmethod  # type: ignore[misc]
def transformer_config_init_subclass(cls: Any, **kwargs: Any) -> None:
    """A subclass gets as fields what its base has not got of MindSpeed's arguments."""
    for key, value in vars(get_full_args()).items():
        if not hasattr(cls, key):
            setattr(cls, key, value)
            cls.__annotations__ = {**vars(cls).get("__annotations__", {}), key: type(value)}
