"""`AlignedRoutes`: the routes of a microbatch as the routers of one stage on one rank take them.

R router rows, L layers, K top-k, E experts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from replay_patch.errors import LayoutError, RouteError
from replay_patch.routes.expert_ids import ids_dtype
from replay_patch.routes.padding import check_lengths, fill_padding
from replay_patch.routes.routes import Routes
from replay_patch.routes.row_index import widest

# Tokens copied at a time, in the order of the rows: what is read and written stays in the cache.
_BLOCK = 512


@dataclass(frozen=True, eq=False, repr=False)
class AlignedRoutes:
    """Made by `RouteBatch.to_rows`.

    Attributes:
        expert_ids: [L, R, K] on the host, with the dtype of the routes: not widened. A layer is a
            contiguous view. Rows of holes are zeros, and mean nothing; padding has experts that
            are distinct in a row and spread evenly.
        captured: bool [R]; the row has the route of a token.
        holes: bool [R]; the token of the row has no captured route, and routes natively.
        padding: bool [R]; the row has no token.
        next_padding: choices made for padding so far, the `first_padding` of the next microbatch.
    """

    expert_ids: Tensor
    captured: Tensor
    holes: Tensor
    padding: Tensor
    next_padding: int

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.expert_ids.shape))
        kinds = (int(kind.sum()) for kind in (self.captured, self.holes, self.padding))
        return "<AlignedRoutes {}, {} rows captured, {} holes, {} padding>".format(shape, *kinds)


def aligned(
    routes: Sequence[Routes],
    places: Sequence[Sequence[int]],
    lengths: Sequence[int],
    rows: Tensor,
    step: int,
    ep_size: int,
    first_padding: int,
) -> AlignedRoutes:
    """One copy from the routes to where the routers take them; nothing else of that size is made.

    Args:
        routes: one per sequence, at least one.
        places: of each, which of its layers, in order.
        lengths: tokens of each.
        rows: int64 [R], the token in each router row, -1 for padding.
        step: how many sequences are side by side in them: row = s * step + b.
        ep_size, first_padding: as in `padding_ids`.

    Raises:
        RouteError: routes that do not fit the sequences.
        LayoutError: rows that do not fit them.
    """
    check_lengths(routes, lengths)
    topk, num_experts = routes[0].topk, routes[0].num_experts
    pieces = _pieces(rows, lengths, step)
    ids = torch.empty(len(places[0]), len(rows), topk, dtype=ids_dtype(num_experts))
    element = widest(ids)
    wide = ids.view(element)
    captured = torch.zeros(len(rows), dtype=torch.bool)
    for number, token, row, count in pieces:
        one = routes[number]
        begin = max(token, one.start)
        count = min(token + count, one.start + one.num_tokens) - begin
        if count <= 0:
            continue
        row += (begin - token) * step
        source = slice(begin - one.start, begin - one.start + count)
        target = slice(row, row + (count - 1) * step + 1, step)
        given = one.expert_ids.view(element)[source]
        for into, taken in _runs(places[number]):
            wide[into, target] = given[:, taken].transpose(0, 1)
        captured[target] = one.captured[source]
    padding = rows < 0
    holes = ~(captured | padding)
    ids.index_fill_(1, _places(holes), 0)
    empty = _places(padding)
    after = fill_padding(ids, empty, num_experts, ep_size, first_padding)
    return AlignedRoutes(ids, captured, holes, padding, after)


def _places(kind: Tensor) -> Tensor:
    # By numpy: where somebody watches a schedule for operations that wait, this is none.
    return torch.from_numpy(np.flatnonzero(kind.numpy()))


def common_layers(routes: Sequence[Routes]) -> list[list[int]]:
    """All layers of each trajectory, which must be the same ones.

    Raises:
        RouteError: they are not, or it is not known which of them are MoE layers.
    """
    axes = [(one.layers, one.num_layers) for one in routes]
    for place, axis in enumerate(axes):
        if axis != axes[0] or axis[0] == "all":
            raise RouteError(
                f"trajectory {place} has layers={axis[0]!r}, {axis[1]} of them, and trajectory 0 "
                f"has layers={axes[0][0]!r}, {axes[0][1]}: expected the same MoE layers; say which "
                "ones, layer_numbers=..."
            )
    return [list(range(count)) for _, count in axes]


def _pieces(rows: Tensor, lengths: Sequence[int], step: int) -> list[tuple[int, int, int, int]]:
    """(sequence, first token in it, first row, count): tokens that are `step` rows apart.

    A sequence is one run, or one for each chunk that context parallelism leaves of it.
    """
    if not len(rows):
        return []
    if len(rows) % step:
        raise LayoutError(f"{len(rows)} rows: expected a multiple of the {step} sequences in them")
    side_by_side = rows.numpy().reshape(-1, step)  # one sequence in each column, or all in one
    height = len(side_by_side)
    in_order = side_by_side.T.ravel()
    at = np.flatnonzero(in_order >= 0)
    tokens = in_order[at]
    if (np.diff(tokens) < 0).any():  # rows that no layout made: right, if slow
        order = tokens.argsort()
        at, tokens = at[order], tokens[order]
    starts = np.cumsum([0, *lengths])
    new = np.ones(len(at) + 1, dtype=np.bool_)  # also after the last
    new[1:-1] = (np.diff(tokens) != 1) | (np.diff(at) != 1)
    new[np.searchsorted(tokens, starts)] = True
    begins = np.flatnonzero(new)
    counts = np.diff(begins)
    at, tokens = at[begins[:-1]], tokens[begins[:-1]]
    numbers = np.searchsorted(starts, tokens, side="right") - 1
    first_rows = at % height * step + at // height
    runs = (numbers, tokens - starts[numbers], first_rows, counts)
    pieces = [
        (number, token + done, row + done * step, min(count - done, _BLOCK))
        for number, token, row, count in zip(*(run.tolist() for run in runs), strict=True)
        for done in range(0, count, _BLOCK)
    ]
    return sorted(pieces, key=lambda piece: piece[2])


def _runs(places: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """(where to, where from): neighbouring layers are copied together."""
    begin = 0
    for end in range(1, len(places) + 1):
        if end == len(places) or places[end] != places[end - 1] + 1:
            yield slice(begin, end), slice(places[begin], places[end - 1] + 1)
            begin = end
