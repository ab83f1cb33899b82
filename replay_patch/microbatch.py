"""What one `load()` hands to the routers of one chunk, made on the host before the forward.

N tokens of the microbatch, R router rows of this rank, L MoE layers of the chunk, E experts, K
top-k.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from replay_patch.errors import LayoutError, RouteError
from replay_patch.routes import RouteBatch, Routes, TokenLayout
from replay_patch.routes.checking import ids_dtype


@dataclass
class Microbatch:
    """The expert ids of one microbatch, compact.

    Attributes:
        num_rows: R.
        dtype: of the ids.
        ids: for each MoE layer of the chunk [R, K] on the device; None: the router's own choice,
            kept here by its first forward.
        holes: bool [R, 1] on the device, rows that route natively; None: there are none.
        captured: bool [R, 1] on the device; None: the overlap with native routes is not sampled.
        counts: rows that are captured, holes, padding.
        replayed: bool [R, 1] on the device, rows that the expert bias does not count because
            their experts are given; None: it counts all.
    """

    num_rows: int
    dtype: torch.dtype
    ids: list[Tensor | None]
    holes: Tensor | None = None
    captured: Tensor | None = None
    counts: tuple[int, int, int] = (0, 0, 0)
    replayed: Tensor | None = None


def router_rows(layout: Any, config: Any) -> Tensor:
    """int64 [R]: the token in each row that the routers of this model see; -1 is padding.

    Raises:
        LayoutError: no layout, or one that was made for another rank.
    """
    if not isinstance(layout, TokenLayout):
        raise LayoutError(f"layout is a {type(layout).__name__}: expected a TokenLayout")
    if config.moe_token_dispatcher_type == "alltoall_seq":
        # 0.12: that router gathers the rows of all tensor-parallel ranks before it selects.
        return layout.input_rows.t().flatten()
    return layout.rows


def recorded(num_rows: int, num_layers: int, num_experts: int) -> Microbatch:
    """A microbatch whose routers choose for themselves."""
    return Microbatch(num_rows, ids_dtype(num_experts), [None] * num_layers)


def replayed(
    routes: Sequence[Routes],
    lengths: Sequence[int],
    rows: Tensor,
    num_experts: int,
    topk: int,
    device: Any,
    sampled: bool,
    padding: Any,
    counted: bool = True,
) -> Microbatch:
    """A microbatch that takes these routes.

    Args:
        routes: one per sequence, in the layers of the chunk only.
        lengths: tokens of each sequence.
        rows: as `router_rows` gives them.
        num_experts: E of the model.
        topk: K of the model.
        device: of the model.
        sampled: whether the overlap with native routes is to be measured.
        padding: int [L, P, K], the experts of the P rows of padding.
        counted: the expert bias counts rows with given experts, too.

    Raises:
        RouteError: routes that do not fit the sequences or the model.
    """
    check(routes, lengths, num_experts, topk)
    num_layers, tokens = len(padding), sum(lengths)
    # In numpy: it is host work, and a profile of the schedule shows none of it as torch's.
    table = np.zeros((tokens, num_layers, topk), _numpy_dtype(num_experts))
    known = np.zeros(tokens, np.bool_)
    first = 0
    for one, length in zip(routes, lengths, strict=True):
        piece = slice(first + one.start, first + one.start + one.num_tokens)
        table[piece] = one.expert_ids.numpy()
        known[piece] = one.captured.numpy()
        first += length

    token = rows.numpy()
    real = token >= 0
    ids = np.empty((num_layers, len(token), topk), table.dtype)
    ids[:, real] = table[token[real]].swapaxes(0, 1)
    ids[:, ~real] = padding
    captured = np.zeros_like(real)
    captured[real] = known[token[real]]
    holes = real & ~captured
    counts = tuple(int(np.count_nonzero(kind)) for kind in (captured, holes, ~real))

    def column(kind: Any) -> Tensor:
        return to_device(torch.from_numpy(kind[:, None]), device)

    return Microbatch(
        num_rows=len(token),
        dtype=ids_dtype(num_experts),
        ids=list(to_device(torch.from_numpy(ids), device).unbind(0)),
        holes=column(holes) if counts[1] else None,
        captured=column(captured) if sampled and counts[0] else None,
        counts=(counts[0], counts[1], counts[2]),
        replayed=None if counted else column(~holes),
    )


def check(routes: Sequence[Routes], lengths: Sequence[int], num_experts: int, topk: int) -> None:
    """Raise RouteError for routes that do not fit the sequences or the model."""
    if len(routes) != len(lengths):
        raise RouteError(f"routes of {len(routes)} sequences: the layout has {len(lengths)}")
    for i, (one, length) in enumerate(zip(routes, lengths, strict=True)):
        end = one.start + one.num_tokens
        if end not in (length, length - 1):
            what = f"{one.num_tokens} rows" + (f" from token {one.start} on" if one.start else "")
            raise RouteError(
                f"sequence {i} has routes of {what}: expected to end after {length} tokens, or "
                f"after {length - 1}, as the last token of a rollout has no route"
            )
        if (one.num_experts, one.topk) != (num_experts, topk):
            raise RouteError(
                f"sequence {i} has routes of {one.num_experts} experts, top-k {one.topk}: the "
                f"model has {num_experts} experts, top-k {topk}"
            )


def in_layers(
    routes: Any, layers: Sequence[int], moe_layers: Sequence[int], num_layers: int
) -> RouteBatch:
    """The routes of a batch in these layers only, before anything is moved or widened.

    Raises:
        RouteError: no routes, or none for one of the layers.
    """
    if isinstance(routes, Routes):
        raise RouteError("routes is one Routes: expected a list, one for each sequence")
    batch = routes if isinstance(routes, RouteBatch) else RouteBatch(routes)
    return batch.for_layers(layers, moe_layers, num_layers)


def padding_ids(
    num_layers: int, num_rows: int, topk: int, num_experts: int, ep_size: int, first: int
) -> Any:
    """Distinct experts for rows of padding, so that no expert and no rank gets more than others.

    Consecutive choices go around the expert-parallel ranks; any window of them differs by at most
    one between two experts, and between two ranks.

    Args:
        num_layers: L.
        num_rows: P.
        topk: K.
        num_experts: E.
        ep_size: expert-parallel ranks; rank r has experts r * E / ep_size and the following.
        first: where to begin; each layer goes on where the last one ended.

    Returns:
        An int64 array [L, P, K].
    """
    local = num_experts // ep_size if num_experts % ep_size == 0 else num_experts
    choice = np.arange(first, first + num_layers * num_rows * topk) % num_experts
    ranks = num_experts // local
    ids = choice % ranks * local + choice // ranks
    return ids.reshape(num_layers, num_rows, topk)


def _numpy_dtype(num_experts: int) -> Any:
    return np.dtype(str(ids_dtype(num_experts)).removeprefix("torch."))


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy to the device that nothing waits for; the tensor itself on the host."""
    if device.type == "cpu":
        return tensor
    with contextlib.suppress(RuntimeError, NotImplementedError):  # not for this kind of device
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
