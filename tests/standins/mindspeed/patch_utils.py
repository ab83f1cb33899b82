"""The patch manager of MindSpeed 2.2 and later, as it is seen from outside.

A patch reads what is in its place only once. Whatever it finds there later is overwritten when it
is applied, and left alone when it is removed.
"""

import importlib
import sys
from collections.abc import Callable
from typing import Any


class Patch:
    """All that MindSpeed puts in one place of Megatron."""

    def __init__(self, orig_func_name: str, new_func: Any, create_dummy: bool = False) -> None:
        self.orig_func_name = orig_func_name
        self.orig_module, self.name = _find(orig_func_name)
        self.orig_func: Any = None
        self.patch_func: Any = None
        self.wrappers: list[Callable[[Any], Any]] = []
        self.final_patch_func: Any = None
        self.is_applied = False
        self._has_read = False
        self.set_patch_func(new_func)

    def set_patch_func(self, new_func: Any, force_patch: bool = False) -> None:
        if new_func.__name__.endswith(("wrapper", "decorator")):
            self.wrappers.append(new_func)
        elif self.patch_func is not None and not force_patch:
            raise RuntimeError(f"the patch of {self.orig_func_name} exist !")
        else:
            self.patch_func = new_func
        self.is_applied = False

    def apply_patch(self) -> None:
        if self.is_applied:
            return
        if not self._has_read:
            self.orig_func, self._has_read = getattr(self.orig_module, self.name), True
        final = self.orig_func if self.patch_func is None else self.patch_func
        for wrapper in self.wrappers:
            final = wrapper(final)
        self.final_patch_func = final
        self._put(final, getattr(self.orig_module, self.name))
        setattr(self.orig_module, self.name, final)
        self.is_applied = True

    def remove_patch(self) -> None:
        if self.is_applied:
            self._put(self.orig_func, self.final_patch_func)
        self.patch_func, self.wrappers, self.is_applied = None, [], False

    def _put(self, new: Any, instead_of: Any) -> None:
        """In the patched place and in every module that has the function under the same name."""
        for module in (self.orig_module, *list(sys.modules.values())):
            # hasattr first, which asks a module-level __getattr__, too
            if hasattr(module, self.name) and getattr(module, self.name) is instead_of:
                setattr(module, self.name, new)


class MindSpeedPatchesManager:
    patches_info: dict[str, Patch] = {}  # noqa: RUF012 - as it is there

    @staticmethod
    def register_patch(
        orig_func_name: str,
        new_func: Any = None,
        force_patch: bool = False,
        create_dummy: bool = False,
    ) -> None:
        patches = MindSpeedPatchesManager.patches_info
        if orig_func_name in patches:
            patches[orig_func_name].set_patch_func(new_func, force_patch)
        else:
            patches[orig_func_name] = Patch(orig_func_name, new_func, create_dummy)

    @staticmethod
    def apply_patches() -> None:
        for patch in MindSpeedPatchesManager.patches_info.values():
            patch.apply_patch()

    @staticmethod
    def remove_patches() -> None:
        for patch in MindSpeedPatchesManager.patches_info.values():
            patch.remove_patch()


def _find(dotted: str) -> tuple[Any, str]:
    """(module or class, name). A name that a module lacks is made there, and is None."""
    path, _, name = dotted.rpartition(".")
    try:
        parent = importlib.import_module(path)
    except ModuleNotFoundError:  # of a class
        module, _, cls = path.rpartition(".")
        parent = getattr(importlib.import_module(module), cls)
        if not hasattr(parent, name):
            raise RuntimeError(f"{dotted} does not exist") from None
    if not hasattr(parent, name):
        setattr(parent, name, None)
    return parent, name
