"""Stand-in for vLLM and SGLang: modules whose every name is an empty class.

verl's server modules import from them; nothing of them is run here but the making of a request.
"""

import importlib.abc
import importlib.machinery
import importlib.metadata
import sys
import types
from typing import Any

PACKAGES = ("vllm", "sglang")
VERSION = "0.22.0"  # verl 0.9 asks for vLLM's; the oldest with which it offers routed_experts


def install() -> None:
    """Put them behind what is installed."""
    sys.meta_path.append(_Finder())
    real = importlib.metadata.version

    def version(name: str) -> str:
        return VERSION if name in PACKAGES else real(name)

    importlib.metadata.version = version


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] in PACKAGES:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = types.ModuleType(spec.name)

        def made(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            setattr(module, name, type(name, (Request,), {"made": [], "__module__": spec.name}))
            return vars(module)[name]

        module.__getattr__ = made
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        module.__version__ = VERSION


class Request:
    """It keeps what it is made from, in `made` of its class."""

    made: list[dict[str, Any]]

    def __init__(self, *args: Any, **given: Any) -> None:
        self.made.append(given)
