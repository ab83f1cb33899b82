"""What `Routes` asks of the things it is made of. T tokens, L layers, E experts, K top-k."""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from replay_patch.errors import ReplayPatchError, RouteError

Layers = str | tuple[int, ...]

# Why a row that was given is not there; `Routes.notes` holds places in this list.
CAUSES = ("", "out of range", "repeating", "unwritten", "missing", "mismatch")
OUT_OF_RANGE, REPEATING, UNWRITTEN, MISSING, MISMATCH = range(1, len(CAUSES))

# Above this many columns sorting a row is faster than comparing every pair of columns.
_PAIRWISE_TOPK = 16
_BLOCK = 2**16

_HOLE_HINT = ". on_invalid='hole' lets such tokens route natively"


def ids_dtype(num_experts: int) -> torch.dtype:
    """What expert ids are stored in. Signed above 8 bits: torch has few kernels for uint16."""
    if num_experts <= 256:
        return torch.uint8
    return torch.int16 if num_experts <= 32768 else torch.int32


@dataclass(frozen=True, eq=False)
class Parts:
    """The fields of a `Routes`, known to be right; see there."""

    expert_ids: Tensor
    captured: Tensor
    num_experts: int
    start: int
    layers: Layers
    empty_layers: tuple[int, ...]
    notes: Tensor | None


def parts(
    expert_ids: Any, num_experts: int, captured: Any, start: int, layers: Any, on_invalid: str
) -> Parts:
    """What is given to the constructor of `Routes`, checked, narrowed and copied."""
    num_experts = integer("num_experts", num_experts, 1)
    if num_experts > 2**31:
        raise RouteError(f"num_experts is {num_experts}: expected at most 2**31, int32 ids")
    policy("on_invalid", on_invalid, "raise", "hole")
    ids = host_ids(expert_ids)
    topk = ids.shape[2]
    if not 1 <= topk <= num_experts:
        raise RouteError(
            f"expert_ids has shape {list(ids.shape)}, so K is {topk}: expected 1 to "
            f"num_experts={num_experts} on the last axis, [tokens, layers, topk]"
        )
    axis = layer_axis(layers, ids.shape[1])
    known = captured_rows(captured, len(ids))
    empty = empty_layers(ids, known) if axis == "all" else []
    stored, known, notes = checked(ids, known, num_experts, empty, axis, on_invalid)
    first = integer("start", start, 0)
    return Parts(stored, known, num_experts, first, axis, tuple(empty), notes)


def checked(
    ids: Tensor,
    captured: Tensor,
    num_experts: int,
    empty: Sequence[int],
    layers: Layers,
    on_invalid: str,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(ids as they are stored, captured, notes)."""
    stored = torch.empty(ids.shape, dtype=ids_dtype(num_experts))
    live = [place for place in range(ids.shape[1]) if place not in empty]
    notes = None
    least, greatest = (int(x) for x in torch.aminmax(ids)) if ids.numel() else (0, 0)
    if least >= 0 and greatest < num_experts:
        stored.copy_(ids)
    else:
        if ids.dtype.itemsize < 4:  # else -1 and num_experts wrap around to ids when compared
            ids = ids.to(torch.int32)
        seen = ids[:, live] if empty else ids
        captured = captured & ~(seen == -1).any(2).any(1)
        outside = ((seen < 0) | (seen > num_experts - 1)).any(2) & captured[:, None]
        if outside.any():
            if on_invalid == "raise":
                _refuse(seen, outside, num_experts, "out of range", live, layers, _HOLE_HINT)
            notes = noted(notes, outside.any(1), OUT_OF_RANGE)
            captured = captured & ~outside.any(1)
        stored.copy_(ids.masked_fill(~captured[:, None, None], 0))
        stored[:, list(empty)] = 0
    seen = stored[:, live] if empty else stored
    repeating = _repeating(seen) & captured[:, None]
    if repeating.any():
        if on_invalid == "raise":
            _refuse(seen, repeating, num_experts, "twice in one row", live, layers, _HOLE_HINT)
        notes = noted(notes, repeating.any(1), REPEATING)
        captured = captured & ~repeating.any(1)
    if not captured.all():
        stored[~captured] = 0
    return stored, captured, notes


def check_stored(
    stored: Tensor, captured: Tensor, num_experts: int, empty: Sequence[int], layers: Layers
) -> None:
    """Raise RouteError unless ids that are in their own dtype are those of captured tokens."""
    if not stored.numel():
        return
    live = [place for place in range(stored.shape[1]) if place not in empty]
    seen = stored[:, live] if empty else stored
    if int(seen.min()) < 0 or int(seen.max()) >= num_experts:
        wide = seen.to(torch.int64)
        outside = ((wide < 0) | (wide >= num_experts)).any(2)
        _refuse(seen, outside, num_experts, "out of range", live, layers, "")
    repeating = _repeating(seen) & captured[:, None]
    if repeating.any():
        _refuse(seen, repeating, num_experts, "twice in one row", live, layers, "")


def noted(notes: Tensor | None, tokens: Tensor, cause: int) -> Tensor:
    """uint8 [T]: `notes` with this cause where `tokens`, bool [T], is True."""
    if notes is None:
        notes = torch.zeros(len(tokens), dtype=torch.uint8)
    return notes.masked_fill(tokens, cause)


def policy(what: str, given: Any, *known: str) -> None:
    """Raise RouteError if `given` is none of the known words."""
    if given not in known:
        raise RouteError(f"{what}={given!r}: expected {' or '.join(map(repr, known))}")


def _repeating(ids: Tensor) -> Tensor:
    """bool [T, L]: rows that hold an expert twice."""
    tokens, layers, topk = ids.shape
    if topk > _PAIRWISE_TOPK:
        ids = ids.sort(2).values
        return (ids[..., 1:] == ids[..., :-1]).any(2)
    rows = ids.reshape(-1, topk).numpy()
    found = np.zeros(len(rows), np.bool_)
    for first in range(0, len(rows), _BLOCK):  # whose columns stay in the cache
        columns = np.ascontiguousarray(rows[first : first + _BLOCK].T)
        block = found[first : first + _BLOCK]
        for i in range(1, topk):
            for j in range(i):
                block |= columns[i] == columns[j]
    return torch.from_numpy(found).view(tokens, layers)


def empty_layers(ids: Tensor, captured: Tensor) -> list[int]:
    """Places on the layer axis where no captured token has more than zeros or -1."""
    rows = ids if bool(captured.all()) else ids[captured]
    if not len(rows):
        return []
    candidates = _blank(rows[0]).nonzero().flatten().tolist()  # few: not all rows need a look
    found = [place for place in candidates if _blank(rows[:, place]).all()]
    return found if len(found) < ids.shape[1] else []  # nothing at all was written: no dense layers


def _blank(ids: Tensor) -> Tensor:
    """bool [...] of ids [..., K]: nothing but zeros, or nothing but -1."""
    blank = torch.zeros(ids.shape[:-1], dtype=torch.bool)
    if ids.dtype is not torch.uint8:  # where -1 would be 255
        blank |= (ids == -1).all(-1)
    if ids.shape[-1] > 1:  # with one expert for each token, 0 is a choice like any other
        blank |= (ids == 0).all(-1)
    return blank


def _refuse(
    ids: Tensor,
    bad: Tensor,
    num_experts: int,
    what: str,
    places: list[int],
    layers: Layers,
    hint: str,
) -> None:
    token, place = (int(i) for i in bad.nonzero()[0])
    row = ids[token, place].tolist()
    axis = places[place]
    layer = f"layer {layers[axis]}" if isinstance(layers, tuple) else f"place {axis} of the layers"
    others = int(bad.any(1).sum()) - 1
    raise RouteError(
        f"expert_ids[{token}, {axis}] (token {token}, {layer} axis) is {row}: an id is {what}; "
        f"expected distinct ids from 0 to {num_experts - 1}, or -1 for a token without a route. "
        f"{others} more tokens are like it{hint}"
    )


def host_ids(given: Any) -> Tensor:
    """Signed or uint8 integers [T, L, K] that compare as the given ones do."""
    what = "expert_ids"
    if isinstance(given, Tensor):
        if given.device.type != "cpu":
            raise RouteError(
                f"{what} is on {given.device}: routes are checked on the host, and nothing is "
                "moved behind your back; pass ids.cpu()"
            )
        if given.is_nested or given.layout is not torch.strided:
            raise RouteError(f"{what} is a nested or sparse tensor: pass one dense tensor for each")
        if given.is_floating_point() or given.is_complex() or given.dtype is torch.bool:
            raise RouteError(f"{what} has dtype {given.dtype}: expected integers")
        tensor = given.detach()
        if tensor.dtype not in _COMPARABLE:  # uint16 and wider: few kernels
            tensor = _from_numpy(tensor.numpy())
    else:
        try:
            array = np.asarray(given)
        except (ValueError, TypeError) as error:  # ragged lists, device tensors in a list
            raise RouteError(f"{what} is no array [tokens, layers, topk]: {error}") from None
        if array.dtype.kind not in "iu":
            raise RouteError(f"{what} has dtype {array.dtype}: expected integers")
        tensor = _from_numpy(array)
    if tensor.dim() != 3:
        raise RouteError(f"{what} has shape {list(tensor.shape)}: expected [tokens, layers, topk]")
    return tensor


_COMPARABLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def _from_numpy(array: Any) -> Tensor:
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        if array.dtype.itemsize == 8:  # not to wrap around to a -1
            array = np.minimum(array, np.uint64(np.iinfo(np.int64).max))
        return torch.from_numpy(array.astype(np.int32 if array.dtype.itemsize == 2 else np.int64))
    # Copies what torch cannot share: other byte orders, negative strides, read-only memory.
    return torch.from_numpy(np.require(array, array.dtype.newbyteorder("="), ["C", "W"]))


def captured_rows(given: Any, tokens: int) -> Tensor:
    """bool [T], a copy; all True if nothing is given."""
    if given is None:
        return torch.ones(tokens, dtype=torch.bool)
    if isinstance(given, Tensor):
        if given.device.type != "cpu":
            raise RouteError(f"captured is on {given.device}: expected a host tensor")
        given = given.numpy()
    found = np.asarray(given)
    if found.shape == (0,) == (tokens,):  # [] says nothing about its type
        found = found.astype(np.bool_)
    if found.dtype != np.bool_ or found.shape != (tokens,):
        raise RouteError(
            f"captured has dtype {found.dtype} and shape {list(found.shape)}: expected bool "
            f"[{tokens}], one for each row of expert_ids"
        )
    return torch.from_numpy(found.copy())


def layer_axis(given: str | Iterable[int], rows: int) -> Layers:
    """What the layer axis means, as `Routes.layers` says it."""
    if isinstance(given, str):
        if given not in ("moe", "all"):
            raise RouteError(f"layers={given!r}: expected 'moe', 'all' or a tuple of layer numbers")
        return given
    numbers = layer_numbers("layers", given)
    if len(numbers) != rows:
        raise RouteError(
            f"layers={numbers} names {len(numbers)} layers, and expert_ids has {rows}: expected "
            "one number for each place on the layer axis"
        )
    return numbers


def layer_numbers(what: str, given: Any) -> tuple[int, ...]:
    """Distinct numbers from 1 on."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise RouteError(f"{what}={given!r}: expected layer numbers")
    numbers = tuple(integer(f"a layer number in {what}", number, 1) for number in given)
    if len(set(numbers)) != len(numbers):
        raise RouteError(f"{what}={numbers}: a layer number is there twice")
    return numbers


def integer(what: str, given: Any, least: int, error: type[ReplayPatchError] = RouteError) -> int:
    """`given` as an int that is at least `least`; bools and device tensors are none."""
    try:
        if isinstance(given, bool) or (isinstance(given, Tensor) and given.device.type != "cpu"):
            raise TypeError("no integer, or one that is read only by waiting for the device")
        number = operator.index(given)
    except TypeError:
        number = least - 1
    if number < least:
        raise error(f"{what} is {given!r}: expected a host integer from {least} on")
    return number
