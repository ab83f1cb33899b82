"""What is really installed here, asked of the live objects and never of a version string."""

import importlib.metadata
import inspect
import sys
from typing import Any


class Probe:
    """Questions that a patch asks before it is applied. Imports nothing, keeps nothing."""

    def find(self, target: str) -> Any:
        """The object at `module:qualname`, or None if this release has none or it is not imported.

        For a class attribute it is what stands in the class (a staticmethod stays one).
        """
        name, _, path = target.partition(":")
        module = sys.modules.get(name)
        if module is None:
            return None
        import wrapt  # see hooks.py

        try:
            return wrapt.resolve_path(module, path)[2]
        except AttributeError:
            return None

    def parameters(self, target: str) -> frozenset[str]:
        """Names of the parameters of the callable at `target`; empty if there is none."""
        found = self.find(target)
        if found is None:
            return frozenset()
        try:
            return frozenset(inspect.signature(found).parameters)
        except (TypeError, ValueError):
            return frozenset()

    def megatron(self) -> str:
        """`megatron-core X.Y.Z` as it calls itself. For messages only."""
        info = sys.modules.get("megatron.core.package_info")
        found = getattr(info, "__version__", None)
        if found is None:
            try:
                found = importlib.metadata.version("megatron-core")
            except importlib.metadata.PackageNotFoundError:
                found = "(version unknown)"
        return f"megatron-core {found}"
