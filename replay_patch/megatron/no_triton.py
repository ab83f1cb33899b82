"""Let Megatron-core 0.18 and later, and MindSpeed, be imported where triton is not installed.

`import megatron.core` itself reaches a module that imports triton without a guard, and MindSpeed
has dozens (of which another triton than Ascend's rejects some). Only those modules see a stub: one
in `sys.modules` would make torch._dynamo (imported by torch.optim) look for triton.backends and
die, and would turn Megatron's own HAVE_TRITON flags true.
"""

import importlib.machinery
import importlib.util
import re
import sys
import types
from collections.abc import Sequence
from typing import Any

_NEED_TRITON = (
    "megatron.core.transformer.moe.paged_stash",  # 0.18
    "megatron.core.transformer.moe.ops.paged_stash",  # 0.19
)

_IMPORT = re.compile(rb"^( *)import triton(?:\.[\w.]+ as (\w+))?(?=[ \r]*(?:#.*)?$)", re.M)


def provide(package: str | None = None) -> None:
    """Register the finder: modules whose names begin with `package` see the stub in any case; with
    None those of Megatron that need one do, unless triton is there."""
    if package is not None:
        _covered.append(package)
    elif importlib.util.find_spec("triton") is None:
        _covered.extend(_NEED_TRITON)
    if _covered and _TritonFreeFinder not in sys.meta_path:
        # Not first: wrapt's finder, which calls import hooks, has to see these modules, too.
        sys.meta_path.insert(sys.meta_path.index(importlib.machinery.PathFinder), _TritonFreeFinder)


_covered: list[str] = []


class _Anything(types.ModuleType):
    """Stands for triton: every attribute exists, and decorators return the function."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(f"{self.__name__}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and callable(args[0]) and not kwargs:  # @triton.jit
            return args[0]
        return lambda function: function  # @triton.autotune(...)


TRITON = _Anything("triton")


class _TritonFreeLoader(importlib.machinery.SourceFileLoader):
    """Compiles a module with its `import triton` lines bound to the stub."""

    def get_code(self, fullname: str) -> types.CodeType:  # by-passes the .pyc
        stub = rb"\1from %s import TRITON as " % __name__.encode()
        source = _IMPORT.sub(
            lambda m: m.expand(stub) + (m[2] or b"triton"), self.get_data(self.path)
        )
        code: types.CodeType = compile(source, self.path, "exec", dont_inherit=True)
        return code


class _TritonFreeFinder:
    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith(tuple(_covered)):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.origin is not None:
            spec.loader = _TritonFreeLoader(name, spec.origin)
        return spec
