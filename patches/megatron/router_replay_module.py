"""Without this patch there is no `megatron.core.transformer.moe.router_replay` before 0.16, and
trainers that import `RouterReplay` from it fail."""

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

from replay_patch.patching import Patch, Transaction

_MODULE = "megatron.core.transformer.moe.router_replay"
_ROUTER = "megatron.core.transformer.moe.router"


class _Provider(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Last on `sys.meta_path`: asked only where the release has no such file."""

    def __init__(self, transaction: Transaction) -> None:
        self.transaction = transaction

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != _MODULE:
            return None
        return importlib.machinery.ModuleSpec(
            name, self, origin="replay_patch.replay.router_replay"
        )

    def exec_module(self, module: ModuleType) -> None:
        from replay_patch.replay import router_replay

        module.__doc__ = router_replay.__doc__
        module.__dict__.update(
            RouterReplay=router_replay.RouterReplay,
            RouterReplayAction=router_replay.RouterReplayAction,
            __all__=["RouterReplay", "RouterReplayAction"],
        )
        self.transaction.cleanups.append(lambda: _forget(module))


def _forget(module: ModuleType) -> None:
    parent, _, name = _MODULE.rpartition(".")
    for mapping, key in ((sys.modules, _MODULE), (vars(sys.modules.get(parent)), name)):
        if mapping.get(key) is module:
            del mapping[key]


def _append_finder(transaction: Transaction) -> None:
    transaction.append(sys.meta_path, _Provider(transaction), "sys.meta_path")


def provided() -> bool:
    """Whether the loaded module is ours."""
    spec = getattr(sys.modules.get(_MODULE), "__spec__", None)
    return isinstance(getattr(spec, "loader", None), _Provider)


def _needed() -> tuple[bool, str]:
    real = _MODULE in sys.modules and not provided()  # the release's router imports its own
    return not real, f"this release has {'its own' if real else 'no'} {_MODULE}"


def _apply(transaction: Transaction) -> None:
    """The finder is already there."""


PATCH = Patch(
    name="router_replay_module",
    library="megatron",
    targets=(f"{_MODULE}:RouterReplay", f"{_MODULE}:RouterReplayAction"),
    requires=_ROUTER,
    checks=("replay-api",),
    why="Trainers import `RouterReplay` from Megatron, which has it only from 0.16 on.",
    how=(
        "A finder appended to `sys.meta_path`, so that a real module always wins, gives the module "
        "with `RouterReplay` and `RouterReplayAction` of `replay_patch.replay.router_replay`."
    ),
    upstream="Megatron-LM commit db6b895c69 (0.16.0)",
    remove_when="0.15 is no longer supported",
    needed=_needed,
    apply=_apply,
    vital=True,
    before_import=_append_finder,
)
