"""Megatron imports `cast_to_fp8` for a Transformer Engine as old as this one."""

from typing import Any


def cast_to_fp8(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("the Transformer Engine stand-in has no FP8")
