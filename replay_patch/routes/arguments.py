"""Checks of arguments that several functions of this package take; `what` names one in errors."""

import operator
from collections.abc import Iterable
from typing import Any

import numpy as np
from torch import Tensor

from replay_patch.errors import ReplayPatchError, RouteError


def integer(what: str, value: Any, least: int, error: type[ReplayPatchError] = RouteError) -> int:
    """`value` as an int from `least` on, else an error; bools and device tensors are none."""
    try:
        if isinstance(value, bool) or (isinstance(value, Tensor) and value.device.type != "cpu"):
            raise TypeError("no integer, or one that is read only by waiting for the device")
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise error(f"{what} is {value!r}: expected a host integer from {least} on")
    return number


def lengths_of_sequences(
    what: str, value: Any, error: type[ReplayPatchError] = RouteError, hint: str = ""
) -> tuple[int, ...]:
    """One int from 0 on for each sequence; see `host_list`."""
    entries = host_list(what, value, "one integer for each sequence", error, hint)
    return tuple(integer(f"{what}[{i}]", length, 0, error) for i, length in enumerate(entries))


def host_list(
    what: str,
    value: Any,
    expected: str,
    error: type[ReplayPatchError] = RouteError,
    hint: str = "",
) -> list[Any]:
    """The entries of a list, array or host tensor, else an error. A tensor on a device is refused
    rather than waited for; `hint` says more of it."""
    if isinstance(value, Tensor) and value.device.type != "cpu":
        raise error(f"{what} is on {value.device}: expected host integers{hint}")
    entries = value.tolist() if isinstance(value, Tensor | np.ndarray) else value
    if isinstance(entries, str) or not isinstance(entries, Iterable):
        raise error(f"{what}={entries!r}: expected {expected}")
    return list(entries)


def layer_numbers(what: str, value: Any) -> tuple[int, ...]:
    """Distinct layer numbers, from 1 on, else a RouteError."""
    entries = host_list(what, value, "layer numbers")
    numbers = tuple(integer(f"a layer number in {what}", number, 1) for number in entries)
    if len(set(numbers)) != len(numbers):
        raise RouteError(f"{what}={numbers}: a layer number is there twice")
    return numbers


def check_word(
    what: str, value: Any, *words: str, error: type[ReplayPatchError] = RouteError
) -> None:
    """Raise an error of this type if `value` is none of the words."""
    if value not in words:
        raise error(f"{what}={value!r}: expected {' or '.join(map(repr, words))}")
