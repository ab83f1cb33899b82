"""The checks of `replay-patch matrix`, in the order in which they are shown. The functions import
what they need; importing this loads neither torch nor Megatron."""

from replay_patch.matrix.checks import plugin, seams, routing, schedules, padding, ascend  # isort: skip
from replay_patch.matrix.registry import CHECKS

__all__ = ["CHECKS"]

_MODULES = (plugin, seams, routing, schedules, padding, ascend)
