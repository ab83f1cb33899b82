"""All patches: every file in a folder of `replay_patch.patches`, found by its name.
There is no list: a new file is a new patch. Importing one loads neither torch nor Megatron."""

import functools
import importlib
import pkgutil

from replay_patch.patching.patch import Patch

_PACKAGE = "replay_patch.patches"


@functools.cache
def patches() -> tuple[Patch, ...]:
    """Every patch, in the order of application: by library and name, each after its `after`.
    Raises ValueError for a name used twice, or an `after` that names no patch or makes a circle."""
    by_name: dict[str, Patch] = {}
    for folder in _submodules(_PACKAGE):
        for path in _submodules(folder):
            if path.rpartition(".")[2].startswith("_"):
                continue
            patch: Patch = importlib.import_module(path).PATCH
            if patch.name in by_name:
                raise ValueError(f"two patches have the name {patch.name}: {path} is one of them")
            by_name[patch.name] = patch
    return _ordered(by_name)


def vital_names() -> frozenset[str]:
    """The patches that replay relies on: it is refused unless each is in place or not needed."""
    return frozenset(patch.name for patch in patches() if patch.vital)


def megatron_modules() -> tuple[str, ...]:
    """Importing these lets every patch of Megatron itself decide; every release has them."""
    required = [patch.requires for patch in patches() if not patch.optional]
    return tuple(dict.fromkeys(required))


def _submodules(package: str) -> list[str]:
    path = importlib.import_module(package).__path__
    return sorted(f"{package}.{module.name}" for module in pkgutil.iter_modules(path))


def _ordered(by_name: dict[str, Patch]) -> tuple[Patch, ...]:
    ordered: dict[str, Patch] = {}
    waiting: list[str] = []

    def add(name: str) -> None:
        if name in ordered:
            return
        if name in waiting:
            raise ValueError(f"patches wait for each other: {' -> '.join([*waiting, name])}")
        waiting.append(name)
        for earlier in by_name[name].after:
            if earlier not in by_name:
                raise ValueError(f"patch {name} comes after {earlier!r}, which is no patch")
            add(earlier)
        waiting.remove(name)
        ordered[name] = by_name[name]

    for name in by_name:
        add(name)
    return tuple(ordered.values())
