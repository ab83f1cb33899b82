"""Stand-in for Ascend's MegatronAdaptor and TransformerEngineNPU: MindSpeed for core 0.17 and 0.18
imports them first. It gives transformer-engine a version, and a package whose classes are empty
Modules, but for the norms, which MindSpeed puts into layers of Megatron's local backend."""

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

_ABSENT = ("general_gemm", "get_workspace", "get_cpu_offload_context", "_SplitAlongDim")
"""Nothing computes here: Megatron does without them."""

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
        if name in _NORMS:
            return _NORMS[name]
        named = name.lstrip("_")[:1].isupper() or name in _FUNCTIONS
        if name.startswith("__") or name in _ABSENT or not named:
            raise AttributeError(name)
        body = {"__module__": self.__name__, "apply": staticmethod(lambda *_, **__: None)}
        value = type(name, (torch.nn.Module,), body)
        setattr(self, name, value)
        return value


class _Norm:
    def __init__(self, normalized_shape, eps, sequence_parallel, **_):
        super().__init__(normalized_shape, eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = sequence_parallel


_NORMS = {
    "LayerNorm": type("LayerNorm", (_Norm, torch.nn.LayerNorm), {}),
    "RMSNorm": type("RMSNorm", (_Norm, torch.nn.RMSNorm), {}),
}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        last = name.rpartition(".")[2]
        ours = name.partition(".")[0] == "transformer_engine" and last not in _ABSENT
        if not ours or last.lstrip("_")[:1].isupper():
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return _Package(spec.name)

    def exec_module(self, module):
        module.__path__ = []


sys.meta_path.insert(0, _Finder())
