"""Checks of arguments that several functions of this package take."""

import operator
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from replay_patch.errors import ReplayPatchError, RouteError


def integer(what: str, value: Any, least: int, error: type[ReplayPatchError] = RouteError) -> int:
    """`value` as an int that is at least `least`; bools and device tensors are none.

    Raises:
        ReplayPatchError: of the type `error`, anything else; `what` names the argument in it.
    """
    try:
        if isinstance(value, bool) or (isinstance(value, Tensor) and value.device.type != "cpu"):
            raise TypeError("no integer, or one that is read only by waiting for the device")
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise error(f"{what} is {value!r}: expected a host integer from {least} on")
    return number


def layer_numbers(what: str, value: Any) -> tuple[int, ...]:
    """Distinct layer numbers, from 1 on.

    Raises:
        RouteError: anything else; `what` names the argument in it.
    """
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise RouteError(f"{what}={value!r}: expected layer numbers")
    numbers = tuple(integer(f"a layer number in {what}", number, 1) for number in value)
    if len(set(numbers)) != len(numbers):
        raise RouteError(f"{what}={numbers}: a layer number is there twice")
    return numbers


def check_word(what: str, value: Any, *words: str) -> None:
    """Raise RouteError if `value` is none of the words; `what` names the argument in it."""
    if value not in words:
        raise RouteError(f"{what}={value!r}: expected {' or '.join(map(repr, words))}")
