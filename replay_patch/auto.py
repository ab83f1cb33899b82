"""`import replay_patch.auto` activates the plugin if `REPLAY_PATCH` asks for it.

For torch < 2.5, for TORCH_DEVICE_BACKEND_AUTOLOAD != "1" and for scripts that import torch_npu
first: then torch does not call our entry point. verl >= 0.9 imports this module through its
`verl.plugins` entry point.
"""

from replay_patch.autoload import load

load("replay_patch.auto")
