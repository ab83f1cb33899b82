"""FP8 is off, and cannot be turned on."""

from typing import Any


class FP8GlobalStateManager:
    @staticmethod
    def is_fp8_enabled() -> bool:
        return False


def fp8_autocast(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("the Transformer Engine stand-in has no FP8")


fp8_model_init = fp8_autocast
