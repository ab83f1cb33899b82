"""Stand-in for Ascend's torch_npu, with only what MindSpeed touches while imported and applied.

Only while it imports torch, it keeps that from loading plugins, itself among them: a script that
imports torch_npu first never gets to any `torch.backends` entry point.
"""

import os

__version__ = "2.7.1"

_wanted = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1")
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
import torch  # noqa: E402

os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = _wanted

from . import contrib, npu, utils  # noqa: E402, F401

torch.npu = npu
unsupported_dtype: list[object] = []


class _C:  # MindSpeed asks what options HCCL's process groups have
    class _distributed_c10d:
        class ProcessGroupHCCL:
            class Options:
                pass


def npu_rms_norm(x, weight, epsilon=1e-6):
    scale = x.float().pow(2).mean(-1, keepdim=True).add(epsilon).rsqrt()
    return (x.float() * scale).to(x.dtype) * weight, scale
