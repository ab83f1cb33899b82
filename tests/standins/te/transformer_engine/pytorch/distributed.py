"""Names that Megatron imports: a tracker to derive from, and the functions of FP8 recompute."""

from typing import Any


class CudaRNGStatesTracker:
    def __init__(self) -> None:
        raise NotImplementedError("the Transformer Engine stand-in has no RNG tracker")


def activation_recompute_forward(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("the Transformer Engine stand-in has no FP8")
