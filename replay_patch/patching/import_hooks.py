"""Run a function as soon as a module is completely imported: now, or when somebody imports it.

wrapt's post-import hooks do the waiting. To them a module in `sys.modules` is finished, also one
that is still being executed (Megatron imported before torch: torch's entry point calls us from the
middle of that import), so that case is handled here.
"""

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def when_imported(name: str, callback: Callable[[], None]) -> None:
    """Call `callback()`, which must not raise, when the module `name` is complete.
    An import that fails calls nothing; a later one that succeeds does."""
    module = sys.modules.get(name)
    if module is None:
        import wrapt  # here: a broken one must not keep status() and the doctor from speaking

        wrapt.register_post_import_hook(lambda _: callback(), name)
        return
    if complete(name):
        callback()
    else:
        _when_complete(module.__spec__, module, callback)


def complete(name: str) -> bool:
    """Whether the module `name` is imported, and its import is over."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return name in sys.modules and not getattr(spec, "_initializing", False)


def _when_complete(spec: Any, module: ModuleType, callback: Callable[[], None]) -> None:
    """Call `callback` when the import system is done with `module`.
    importlib sets `spec._initializing = False` as the very last step of an import, and offers no
    hook there. So for the rest of this one import that attribute is a property of the spec."""
    spec_class: type[ModuleSpec] = type(spec)

    def end_import(self: Any, value: bool) -> None:
        self.__class__ = spec_class
        self._initializing = value
        if sys.modules.get(spec.name) is module:
            callback()
        else:  # the import failed and was taken back: wait for the next one
            when_imported(spec.name, callback)

    # Two waiting callbacks nest: the inner property is met again when `end_import` sets the value.
    initializing = property(lambda spec: True, end_import)
    spec.__class__ = type(spec_class.__name__, (spec_class,), {"_initializing": initializing})
