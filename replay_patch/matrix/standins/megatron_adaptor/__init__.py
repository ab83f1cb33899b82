"""Stand-in for Ascend's MegatronAdaptor and TransformerEngineNPU, which MindSpeed for core 0.17 and
0.18 imports first.

It gives transformer-engine a version, and a package in which every class name is an empty Module.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import sys
import types

import torch
import torch_npu.contrib.transfer_to_npu  # noqa: F401

_VERSION = "2.2.0"
_PACKAGES = ("pytorch", "common", "ops", "recipe", "distributed", "fp8", "module", "permutation")
_FUNCTIONS = (
    *("fp8_autocast", "fp8_model_init", "checkpoint", "activation_recompute_forward"),
    *("moe_permute", "moe_permute_with_probs", "moe_unpermute"),
    *("moe_sort_chunks_by_index", "moe_sort_chunks_by_index_with_probs"),
)

_version = importlib.metadata.version
importlib.metadata.version = lambda name: (
    _VERSION if name == "transformer-engine" else _version(name)
)
torch.compile = lambda model=None, **_: model or (lambda function: function)


class _Package(types.ModuleType):
    __version__ = _VERSION

    def __getattr__(self, name):
        if name in _PACKAGES:
            return importlib.import_module(f"{self.__name__}.{name}")
        if name.startswith("__") or not (name.lstrip("_")[0].isupper() or name in _FUNCTIONS):
            raise AttributeError(name)
        body = {"__module__": self.__name__, "apply": staticmethod(lambda *_, **__: None)}
        value = type(name, (torch.nn.Module,), body)
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        last = name.rpartition(".")[2]
        if name.partition(".")[0] != "transformer_engine" or last.lstrip("_")[:1].isupper():
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return _Package(spec.name)

    def exec_module(self, module):
        module.__path__ = []


sys.meta_path.insert(0, _Finder())
