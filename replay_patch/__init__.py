"""Routing replay for mixture-of-experts reinforcement learning on every Megatron-core from 0.12.

The public names below are resolved on first use (PEP 562): importing this package loads no torch,
numpy, wrapt or Megatron, because torch imports it in every process through an entry point.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from replay_patch.errors import (
        LayoutError,
        PatchNotActive,
        ReplayPatchError,
        RouteError,
        SettingsError,
        WireError,
    )
    from replay_patch.megatron.local_layers import local_layers
    from replay_patch.patching.activation import Status, activate, deactivate, status
    from replay_patch.routes import RouteBatch, Routes, TokenLayout
    from replay_patch.sessions.schedule import recording, replaying

__version__ = "0.1.0"

OFF = frozenset({"", "0", "false", "off", "no"})
"""Words that switch a setting off. Here, because with the plugin off nothing else is loaded."""

_HOME = {
    "Status": "patching.activation",
    "activate": "patching.activation",
    "deactivate": "patching.activation",
    "status": "patching.activation",
    "LayoutError": "errors",
    "PatchNotActive": "errors",
    "ReplayPatchError": "errors",
    "RouteError": "errors",
    "SettingsError": "errors",
    "WireError": "errors",
    "local_layers": "megatron.local_layers",
    "RouteBatch": "routes",
    "Routes": "routes",
    "TokenLayout": "routes",
    "recording": "sessions.schedule",
    "replaying": "sessions.schedule",
}

__all__ = [
    "LayoutError",
    "PatchNotActive",
    "ReplayPatchError",
    "RouteBatch",
    "RouteError",
    "Routes",
    "SettingsError",
    "Status",
    "TokenLayout",
    "WireError",
    "__version__",
    "activate",
    "deactivate",
    "local_layers",
    "recording",
    "replaying",
    "status",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        # MindSpeed probes every loaded module with hasattr: answer, and import nothing.
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return __all__
