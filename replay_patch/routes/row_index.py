"""`RowIndex`: rows to take from a tensor or an array, and a fill where there is none.
N values, any shape [...] of each; P places to fill."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from replay_patch.errors import LayoutError
from replay_patch.routes.device_copies import to_device


class RowIndex:
    """Which of N values goes to each place: int64 of any shape, on the host; -1 takes the fill. It
    is copied once to each device that values come from, and never read back, so that taking waits
    for no device."""

    def __init__(self, rows: Tensor) -> None:
        flat = rows.flatten()
        empty = (flat < 0).nonzero().flatten()
        self.shape = tuple(rows.shape)
        self._host = flat.clamp(min=0), empty if len(empty) else None
        self._copies: dict[torch.device, tuple[Tensor, Tensor | None]] = {}

    def take(self, values: Any, fill: Any = None) -> Any:
        """`values` [N, ...] at each place: [*shape, ...], of the same dtype, on the same device.

        Args:
            values: a tensor (gradients flow through) or an array; a LayoutError if torch lacks
                kernels for its dtype.
            fill: a number that the dtype can hold, else a LayoutError; not looked at if nothing is
                filled.
        """
        shape = self.shape + tuple(values.shape[1:])
        if self._host[1] is not None:
            check_fill(fill, values.dtype)
        if isinstance(values, np.ndarray):
            rows, empty = self._host
            if not len(values):
                return np.full(shape, fill, dtype=values.dtype)
            taken = values.take(rows.numpy(), axis=0)
            if empty is not None:
                taken[empty.numpy()] = fill
            return taken.reshape(shape)
        if not len(values):
            return values.new_full(shape, 0 if fill is None else fill)
        rows, empty = self._on(values.device)
        try:
            taken = values.index_select(0, rows)
            if empty is not None:
                taken.index_fill_(0, empty, fill)
        except NotImplementedError as error:
            raise LayoutError(
                f"values have dtype {values.dtype}, for which torch lacks kernels ({error}): pass "
                "a signed or wider one"
            ) from None
        return taken.reshape(shape)

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor | None]:
        if device.type == "cpu":
            return self._host
        if device not in self._copies:
            rows, empty = self._host
            copied = None if empty is None else to_device(empty, device)
            self._copies[device] = to_device(rows, device), copied
        return self._copies[device]


# Widest first. Nothing is computed in these dtypes: bytes are only moved.
_ELEMENTS = {16: torch.complex128, 8: torch.int64, 4: torch.int32, 2: torch.int16}


def widest(ids: Tensor) -> torch.dtype:
    """What to view the last axis as, so that a row is moved in few pieces, not id by id."""
    size = ids.shape[-1] * ids.dtype.itemsize
    fitting = (w for w in _ELEMENTS if w > ids.dtype.itemsize and size % w == 0)
    return _ELEMENTS.get(next(fitting, 0), ids.dtype)


def inverse(rows: Tensor, count: int) -> Tensor:
    """int64 [count]: where each of 0 ... count - 1 is in the flattened rows; -1: it is not."""
    flat = rows.flatten()
    real = (flat >= 0).nonzero().flatten()
    places = torch.full((count,), -1, dtype=torch.int64)
    places[flat[real]] = real
    return places


def check_fill(fill: Any, dtype: Any) -> None:
    """Refuse a fill that would be wrapped, truncated or made True without a word."""
    of_torch = isinstance(dtype, torch.dtype)
    if not of_torch:
        kind = dtype.kind
    elif dtype.is_floating_point or dtype.is_complex:
        kind = "f"
    else:
        kind = "b" if dtype is torch.bool else "i"
    if kind in "iu":
        limits: Any = torch.iinfo(dtype) if of_torch else np.iinfo(dtype)
        number = isinstance(fill, int | float | np.number) and math.isfinite(fill)
        fits = number and int(fill) == fill and limits.min <= fill <= limits.max
    elif kind == "b":
        fits = isinstance(fill, bool | np.bool_ | int) and fill in (0, 1)
    elif kind in "fc":
        fits = isinstance(fill, int | float | complex | np.number)
    else:  # arrays of objects or words
        fits = True
    if not fits:
        raise LayoutError(
            f"fill={fill!r} for values of {dtype}: expected a number that this dtype can hold, as "
            "padding gets it"
        )


def dense_shape(values: Any) -> tuple[int, ...]:
    """The shape of a dense tensor or array; anything else is a LayoutError."""
    if not isinstance(values, Tensor | np.ndarray):
        raise LayoutError(f"values is a {type(values).__name__}: expected a tensor or an array")
    if isinstance(values, Tensor) and (values.is_nested or values.layout is not torch.strided):
        raise LayoutError("values is a nested or sparse tensor: expected a dense one")
    return tuple(values.shape)
