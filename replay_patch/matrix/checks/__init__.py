"""The checks of `replay-patch matrix`, in the order in which they are shown.

Importing this loads neither torch nor Megatron: the functions import what they need.
"""

from replay_patch.matrix.checks import plugin, seams, routing, schedules, padding, ascend  # isort: skip
from replay_patch.matrix.registry import CHECKS

__all__ = ["CHECKS"]

_MODULES = (plugin, seams, routing, schedules, padding, ascend)
