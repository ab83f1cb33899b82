"""Errors and warnings about routers: what was found and expected, in which release and layer."""

import importlib.metadata
import logging
import sys
from dataclasses import dataclass
from typing import Any, NoReturn

from replay_patch.errors import RouteError

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Where:
    """Which router an error or a warning is about; as a string `layer 1 of MTP block 2`.

    Attributes:
        layer_number: Megatron's, from 1; None if the router has not been told.
        mtp_depth: the place of its block in `mtp.layers`, from 1; 0 in the decoder.
    """

    layer_number: int | None
    mtp_depth: int = 0

    @classmethod
    def of(cls, router: Any) -> "Where":
        """That of a router of Megatron's, which knows no depth, or of its replay object."""
        return cls(router.layer_number, getattr(router, "mtp_depth", 0))

    def __str__(self) -> str:
        number = "?" if self.layer_number is None else self.layer_number
        return f"layer {number}" + (f" of MTP block {self.mtp_depth}" if self.mtp_depth else "")


def refuse(found: str, expected: str, where: Where | None = None) -> NoReturn:
    """Raise RouteError with the release, the router (unless `where` is None), what was `found`
    wrong, and what was `expected`: what would have been right, and what to do."""
    router = "" if where is None else f", router of {where}"
    raise RouteError(f"{installed_megatron()}{router}: {found}; expected {expected}")


def installed_megatron() -> str:
    """`megatron-core X.Y.Z` as it calls itself. For messages only."""
    info = sys.modules.get("megatron.core.package_info")
    version = getattr(info, "__version__", None)
    if version is None:
        try:
            version = importlib.metadata.version("megatron-core")
        except importlib.metadata.PackageNotFoundError:
            version = "(version unknown)"
    return f"megatron-core {version}"


def warn_once(message: str, *args: Any) -> None:
    """Log a warning the first time that this message is given in this process."""
    if message not in _warned:
        _warned.add(message)
        _log.warning(message, *args)


_warned: set[str] = set()
