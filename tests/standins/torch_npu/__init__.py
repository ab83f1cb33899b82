"""Stand-in for Ascend's torch_npu: how it imports torch, and nothing else.

It keeps torch from loading plugins, itself among them, while it imports torch, and then puts the
variable back: a script that imports it first never gets to any `torch.backends` entry point.
"""

import os

_wanted = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1")
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
import torch  # noqa: E402, F401

os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = _wanted
