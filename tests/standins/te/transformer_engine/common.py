"""`recipe.DelayedScaling` is the base of a class of Megatron's."""

from types import SimpleNamespace
from typing import Any


class DelayedScaling:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("the Transformer Engine stand-in has no FP8")


recipe = SimpleNamespace(DelayedScaling=DelayedScaling)
