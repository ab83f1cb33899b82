"""Stand-in for what MindSpeed (2.2 ... 26.1) does to `TransformerConfig.__init__`.

It is not on PyPI. Imitated, from facts and not from code: every constructor argument is looked up
in the class's signature; one that is not there becomes an attribute of a class made for this one
object, unless the class already has an attribute of that name, in which case it is dropped.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any


def init_wrapper(original: Callable[..., None], command_line: dict[str, Any]) -> Any:
    """`__init__` as MindSpeed wraps it; `command_line` holds its parsed arguments."""

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        given = command_line | kwargs
        known = inspect.signature(type(self)).parameters
        new = {k: v for k, v in given.items() if k not in known and not hasattr(self, k)}
        fields = [(k, type(v), dataclasses.field(init=False)) for k, v in new.items()]
        self.__class__ = dataclasses.make_dataclass(
            type(self).__name__, fields, bases=(type(self),)
        )
        for key, value in new.items():
            setattr(self, key, value)
        original(self, *args, **{k: v for k, v in given.items() if k in known})

    return wrapper
