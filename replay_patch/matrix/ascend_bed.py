"""Apply a real MindSpeed on a machine without an NPU, as the first lines of a job do.

    from replay_patch.matrix import ascend_bed, cpu
    cpu.install()
    ascend_bed.adapt()            # before the first import of megatron.core

MindSpeed and Megatron are the real ones; torch_npu, torchair, acl and MegatronAdaptor are stand-ins
(`replay_patch/matrix/standins/`, put on the path by whoever starts the process). There are no
kernels: build models with `tiny.gpt_model`, which gives them a plain attention.
"""

import importlib
import sys
import typing
from typing import Any

from replay_patch.megatron import no_triton

__all__ = ["adapt", "mindspeed_args", "repatch"]

_ARGUMENTS = {"transformer_impl": "local"}
"""The arguments of a training script for which MindSpeed has no default."""


def adapt() -> Any:
    """Import MindSpeed, which rewrites Megatron; returns its package, raises whatever it raises."""
    sys.argv = sys.argv[:1]  # every option in it becomes a field of every config
    no_triton.provide("mindspeed.")
    if not hasattr(typing, "override"):  # before Python 3.12, which core 0.17 and later are for
        import typing_extensions

        typing.override = typing_extensions.override  # type: ignore[attr-defined]
    importlib.import_module("mindspeed.megatron_adaptor")
    if hasattr(sys.modules["mindspeed.megatron_adaptor"], "repatch"):
        vars(mindspeed_args()).update(_ARGUMENTS)
    else:  # 2.1: a config asks megatron.training, whose arguments a training script has made
        from megatron.training import arguments, global_vars

        global_vars._GLOBAL_ARGS = arguments.parse_args(ignore_unknown_args=True)
        vars(global_vars._GLOBAL_ARGS).update(_ARGUMENTS)
    return sys.modules["mindspeed"]


def mindspeed_args() -> Any:
    """The namespace of MindSpeed's own arguments, from which it fills configs (2.2 and later)."""
    from mindspeed.args_utils import get_mindspeed_args

    return get_mindspeed_args()


def repatch(**arguments: Any) -> bool:
    """MindSpeed's `repatch`, as verl calls it; False if this one has none (2.1)."""
    again = getattr(sys.modules["mindspeed.megatron_adaptor"], "repatch", None)
    if again is not None:
        again(arguments)
    return again is not None
