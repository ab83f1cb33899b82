"""How a refusal names the router and the release that it is about."""

import importlib.metadata
import logging
import sys
from typing import Any, NoReturn

from replay_patch.errors import RouteError

_log = logging.getLogger(__name__)


def refuse(found: str, expected: str, replay: Any = None) -> NoReturn:
    """Raise RouteError with the release, the router (unless None), and both halves."""
    where = "" if replay is None else f", router of {describe(replay)}"
    raise RouteError(f"{installed_megatron()}{where}: {found}; expected {expected}")


def installed_megatron() -> str:
    """`megatron-core X.Y.Z` as it calls itself. For messages only."""
    info = sys.modules.get("megatron.core.package_info")
    found = getattr(info, "__version__", None)
    if found is None:
        try:
            found = importlib.metadata.version("megatron-core")
        except importlib.metadata.PackageNotFoundError:
            found = "(version unknown)"
    return f"megatron-core {found}"


def describe(replay: Any) -> str:
    """`layer 3` or `layer 1 of MTP block 2`, as errors name a router."""
    number = "?" if replay.layer_number is None else replay.layer_number
    return f"layer {number}" + (f" of MTP block {replay.mtp_depth}" if replay.mtp_depth else "")


def warn_once(message: str, *args: Any) -> None:
    """Log a warning the first time that this message is given in this process."""
    if message not in _warned:
        _warned.add(message)
        _log.warning(message, *args)


_warned: set[str] = set()
