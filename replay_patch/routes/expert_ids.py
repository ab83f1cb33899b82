"""`CheckedRoutes`: expert ids as trainers and engines hold them, checked and narrowed.
T tokens (rows), L layers, E experts, K top-k."""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from replay_patch.errors import RouteError
from replay_patch.routes.arguments import check_word, integer
from replay_patch.routes.layer_axis import Layers, checked_layers

# Above this many columns sorting a row is faster than comparing every pair of columns.
_PAIRWISE_TOPK = 16
_BLOCK = 2**16

_HOLE_HINT = ". on_invalid='hole' lets such tokens route natively"

CAUSES = ("", "out of range", "repeating", "unwritten", "missing", "mismatch")
"""Why a row that an engine returned is not in the routes; `notes` holds places in this list."""
OUT_OF_RANGE, REPEATING, UNWRITTEN, MISSING, MISMATCH = range(1, len(CAUSES))


@dataclass(frozen=True, eq=False)
class CheckedRoutes:
    """One piece of a trajectory, known to be right. `Routes` says what each field means."""

    expert_ids: Tensor
    captured: Tensor
    num_experts: int
    start: int
    layers: Layers
    empty_layers: tuple[int, ...]
    notes: Tensor | None

    @property
    def end(self) -> int:
        """The token after the last row."""
        return self.start + len(self.expert_ids)


def with_cause(notes: Tensor | None, tokens: Tensor, cause: int) -> Tensor:
    """uint8 [T]: `notes`, and `cause` where `tokens`, bool [T], is True."""
    if notes is None:
        notes = torch.zeros(len(tokens), dtype=torch.uint8)
    return notes.masked_fill(tokens, cause)


def ids_dtype(num_experts: int) -> torch.dtype:
    """What expert ids are stored in. Signed above 8 bits: torch has few kernels for uint16."""
    if num_experts <= 256:
        return torch.uint8
    return torch.int16 if num_experts <= 32768 else torch.int32


def checked_routes(
    expert_ids: Any,
    num_experts: int,
    captured: Any,
    start: int,
    layers: str | Iterable[int],
    on_invalid: str,
) -> CheckedRoutes:
    """The arguments of `Routes`, checked, narrowed and copied; errors as there."""
    num_experts = integer("num_experts", num_experts, 1)
    if num_experts > 2**31:
        raise RouteError(f"num_experts is {num_experts}: expected at most 2**31, int32 ids")
    check_word("on_invalid", on_invalid, "raise", "hole")
    ids = host_ids(expert_ids)
    topk = ids.shape[2]
    if not 1 <= topk <= num_experts:
        raise RouteError(
            f"expert_ids has shape {list(ids.shape)}, so K is {topk}: expected 1 to "
            f"num_experts={num_experts} on the last axis, [tokens, layers, topk]"
        )
    axis = checked_layers(layers, ids.shape[1])
    flags = _captured_flags(captured, len(ids))
    empty = _empty_layers(ids, flags) if axis == "all" else []
    stored, flags, notes = _narrow(ids, flags, num_experts, empty, axis, on_invalid)
    first_token = integer("start", start, 0)
    return CheckedRoutes(stored, flags, num_experts, first_token, axis, tuple(empty), notes)


def _narrow(
    ids: Tensor,
    captured: Tensor,
    num_experts: int,
    empty: Sequence[int],
    layers: Layers,
    on_invalid: str,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(ids [T, L, K] in the dtype that they are stored in, captured [T], notes [T] or None)."""
    stored = torch.empty(ids.shape, dtype=ids_dtype(num_experts))
    live = [place for place in range(ids.shape[1]) if place not in empty]
    refuse = functools.partial(_refuse_row, num_experts, live, layers, _HOLE_HINT)
    notes = None
    least, greatest = (int(x) for x in torch.aminmax(ids)) if ids.numel() else (0, 0)
    if least >= 0 and greatest < num_experts:
        stored.copy_(ids)
    else:
        if ids.dtype.itemsize < 4:  # else -1 and num_experts wrap around to ids when compared
            ids = ids.to(torch.int32)
        live_ids = ids[:, live] if empty else ids
        captured = captured & ~(live_ids == -1).any(2).any(1)
        outside = ((live_ids < 0) | (live_ids > num_experts - 1)).any(2) & captured[:, None]
        if outside.any():
            if on_invalid == "raise":
                refuse(live_ids, outside, "out of range")
            notes = with_cause(notes, outside.any(1), OUT_OF_RANGE)
            captured = captured & ~outside.any(1)
        stored.copy_(ids.masked_fill(~captured[:, None, None], 0))
        stored[:, list(empty)] = 0
    live_ids = stored[:, live] if empty else stored
    repeating = _repeated_experts(live_ids) & captured[:, None]
    if repeating.any():
        if on_invalid == "raise":
            refuse(live_ids, repeating, "twice in one row")
        notes = with_cause(notes, repeating.any(1), REPEATING)
        captured = captured & ~repeating.any(1)
    if not captured.all():
        stored[~captured] = 0
    return stored, captured, notes


def check_stored_ids(
    stored: Tensor, captured: Tensor, num_experts: int, empty: Sequence[int], layers: Layers
) -> None:
    """A RouteError unless ids [T, L, K], in the dtype that they are stored in, can be routes. Only
    `captured` rows, bool [T], are read for repeated experts; `empty` places on the layer axis are
    not looked at."""
    if not stored.numel():
        return
    live = [place for place in range(stored.shape[1]) if place not in empty]
    live_ids = stored[:, live] if empty else stored
    refuse = functools.partial(_refuse_row, num_experts, live, layers, "")
    if int(live_ids.min()) < 0 or int(live_ids.max()) >= num_experts:
        wide = live_ids.to(torch.int64)
        outside = ((wide < 0) | (wide >= num_experts)).any(2)
        refuse(live_ids, outside, "out of range")
    repeating = _repeated_experts(live_ids) & captured[:, None]
    if repeating.any():
        refuse(live_ids, repeating, "twice in one row")


def _repeated_experts(ids: Tensor) -> Tensor:
    """bool [T, L]: rows that hold an expert twice."""
    tokens, layers, topk = ids.shape
    if topk > _PAIRWISE_TOPK:
        ids = ids.sort(2).values
        return (ids[..., 1:] == ids[..., :-1]).any(2)
    rows = ids.reshape(-1, topk).numpy()
    repeated = np.zeros(len(rows), np.bool_)
    for first in range(0, len(rows), _BLOCK):  # blocks that stay in the cache
        columns = np.ascontiguousarray(rows[first : first + _BLOCK].T)
        block = repeated[first : first + _BLOCK]
        for i in range(1, topk):
            for j in range(i):
                block |= columns[i] == columns[j]
    return torch.from_numpy(repeated).view(tokens, layers)


def _empty_layers(ids: Tensor, captured: Tensor) -> list[int]:
    """Places on the layer axis where no captured token has more than zeros or -1."""
    rows = ids if bool(captured.all()) else ids[captured]
    if not len(rows):
        return []
    candidates = _blank(rows[0]).nonzero().flatten().tolist()  # few: not all rows need a look
    empty = [place for place in candidates if _blank(rows[:, place]).all()]
    return empty if len(empty) < ids.shape[1] else []  # nothing at all was written: no dense layers


def _blank(ids: Tensor) -> Tensor:
    """bool [...] of ids [..., K]: nothing but zeros, or nothing but -1."""
    blank = torch.zeros(ids.shape[:-1], dtype=torch.bool)
    if ids.dtype is not torch.uint8:  # where -1 would be 255
        blank |= (ids == -1).all(-1)
    if ids.shape[-1] > 1:  # with one expert for each token, 0 is a choice like any other
        blank |= (ids == 0).all(-1)
    return blank


def _refuse_row(
    num_experts: int,
    live: Sequence[int],
    layers: Layers,
    hint: str,
    ids: Tensor,
    bad: Tensor,
    what: str,
) -> NoReturn:
    """Name the first bad row of ids [T, live layers, K]; `bad` is bool [T, live layers]."""
    token, place = (int(i) for i in bad.nonzero()[0])
    row = ids[token, place].tolist()
    axis = live[place]
    layer = f"layer {layers[axis]}" if isinstance(layers, tuple) else f"place {axis} of the layers"
    others = int(bad.any(1).sum()) - 1
    raise RouteError(
        f"expert_ids[{token}, {axis}] (token {token}, {layer} axis) is {row}: an id is {what}; "
        f"expected distinct ids from 0 to {num_experts - 1}, or -1 for a token without a route. "
        f"{others} more tokens are like it{hint}"
    )


def host_ids(ids: Any) -> Tensor:
    """Integers [T, L, K], uint8 or signed, that compare with numbers as those of `ids` do, from a
    tensor on the host, an array or nested lists; a RouteError for all else."""
    what = "expert_ids"
    if isinstance(ids, Tensor):
        if ids.device.type != "cpu":
            raise RouteError(
                f"{what} is on {ids.device}: routes are checked on the host, and nothing is "
                "moved behind your back; pass ids.cpu()"
            )
        if ids.is_nested or ids.layout is not torch.strided:
            raise RouteError(f"{what} is a nested or sparse tensor: pass one dense tensor for each")
        if ids.is_floating_point() or ids.is_complex() or ids.dtype is torch.bool:
            raise RouteError(f"{what} has dtype {ids.dtype}: expected integers")
        tensor = ids.detach()
        if tensor.dtype not in _COMPARABLE:  # uint16 and wider: few kernels
            tensor = _from_numpy(tensor.numpy())
    else:
        try:
            array = np.asarray(ids)
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
    # Copies what torch cannot share: other byte orders, read-only memory, negative strides. numpy
    # calls an axis contiguous, whatever its stride, if nothing or one entry is on it.
    shared = np.require(array, array.dtype.newbyteorder("="), ["C", "W"])
    return torch.from_numpy(shared.copy() if min(shared.strides, default=0) < 0 else shared)


def _captured_flags(captured: Any, tokens: int) -> Tensor:
    """bool [T], a copy of `captured`; all True if it is None."""
    if captured is None:
        return torch.ones(tokens, dtype=torch.bool)
    if isinstance(captured, Tensor):
        if captured.device.type != "cpu":
            raise RouteError(f"captured is on {captured.device}: expected a host tensor")
        captured = captured.numpy()
    flags = np.asarray(captured)
    if flags.shape == (0,) == (tokens,):  # [] says nothing about its type
        flags = flags.astype(np.bool_)
    if flags.dtype != np.bool_ or flags.shape != (tokens,):
        raise RouteError(
            f"captured has dtype {flags.dtype} and shape {list(flags.shape)}: expected bool "
            f"[{tokens}], one for each row of expert_ids"
        )
    return torch.from_numpy(flags.copy())
