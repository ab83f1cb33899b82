"""`AlignedRoutes`: the routes of a microbatch as the routers of one stage on one rank take them.
R router rows, L layers, K top-k, E experts."""

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
        expert_ids: [L, R, K] on the host, with the dtype of the routes, not widened. A layer is a
            contiguous view. Rows of holes are zeros, and mean nothing; padding has experts that are
            distinct in a row and spread evenly.
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


def routes_in_rows(
    routes: Sequence[Routes],
    places: Sequence[Sequence[int]],
    lengths: Sequence[int],
    rows: Tensor,
    step: int,
    ep_size: int,
    first_padding: int,
) -> AlignedRoutes:
    """Copy routes once, to where the routers take them; nothing else of that size is made.

    Args:
        routes, lengths: one for each sequence, at least one; lengths in tokens.
        places: of each, which places of its layer axis, in order.
        rows: int64 [R], the token in each router row, -1 for padding.
        step: how many sequences are side by side in the rows: row = s * step + b.
        ep_size, first_padding: as in `fill_padding`.
    """
    check_lengths(routes, lengths)
    topk, num_experts = routes[0].topk, routes[0].num_experts
    ids = torch.empty(len(places[0]), len(rows), topk, dtype=ids_dtype(num_experts))
    element = widest(ids)
    wide = ids.view(element)
    captured = torch.zeros(len(rows), dtype=torch.bool)
    for sequence, token, row, count in _runs_of_tokens(rows, lengths, step):
        trajectory = routes[sequence]
        begin, end = max(token, trajectory.start), min(token + count, trajectory.end)
        if end <= begin:
            continue
        row += (begin - token) * step
        source = slice(begin - trajectory.start, end - trajectory.start)
        target = slice(row, row + (end - begin - 1) * step + 1, step)
        wide_rows = trajectory.expert_ids.view(element)[source]
        for target_layers, source_layers in _runs_of_layers(places[sequence]):
            wide[target_layers, target] = wide_rows[:, source_layers].transpose(0, 1)
        captured[target] = trajectory.captured[source]
    padding = rows < 0
    holes = ~(captured | padding)
    ids.index_fill_(1, _numbers(holes), 0)
    next_padding = fill_padding(ids, _numbers(padding), num_experts, ep_size, first_padding)
    return AlignedRoutes(ids, captured, holes, padding, next_padding)


def _numbers(rows: Tensor) -> Tensor:
    """int64: the rows for which bool [R] is True."""
    # By numpy: a check of a schedule for operations that wait for a device counts torch's nonzero.
    return torch.from_numpy(np.flatnonzero(rows.numpy()))


def all_places(routes: Sequence[Routes]) -> list[list[int]]:
    """Every place on the layer axis of each trajectory; a RouteError unless the axes are the same,
    and known to be MoE layers."""
    axes = [(trajectory.layers, trajectory.num_layers) for trajectory in routes]
    for number, axis in enumerate(axes):
        if axis != axes[0] or axis[0] == "all":
            raise RouteError(
                f"trajectory {number} has layers={axis[0]!r}, {axis[1]} of them, and trajectory 0 "
                f"has layers={axes[0][0]!r}, {axes[0][1]}: expected the same MoE layers; say which "
                "ones, layer_numbers=..."
            )
    return [list(range(count)) for _, count in axes]


def _runs_of_tokens(
    rows: Tensor, lengths: Sequence[int], step: int
) -> list[tuple[int, int, int, int]]:
    """(sequence, first token in it, first row, count): tokens that are `step` rows apart. A
    sequence is one run, or one for each chunk that context parallelism leaves of it; runs longer
    than `_BLOCK` are divided."""
    if not len(rows):
        return []
    if len(rows) % step:
        raise LayoutError(f"{len(rows)} rows: expected a multiple of the {step} sequences in them")
    side_by_side = rows.numpy().reshape(-1, step)  # one sequence in each column, or all in one
    height = len(side_by_side)
    by_column = side_by_side.T.ravel()
    cells = np.flatnonzero(by_column >= 0)
    tokens = by_column[cells]
    if (np.diff(tokens) < 0).any():  # rows that no layout made: right, if slow
        order = tokens.argsort()
        cells, tokens = cells[order], tokens[order]
    starts = np.cumsum([0, *lengths])
    is_first = np.ones(len(cells) + 1, dtype=np.bool_)  # of a run; also after the last
    is_first[1:-1] = (np.diff(tokens) != 1) | (np.diff(cells) != 1)
    is_first[np.searchsorted(tokens, starts)] = True
    begins = np.flatnonzero(is_first)
    counts = np.diff(begins)
    cells, tokens = cells[begins[:-1]], tokens[begins[:-1]]
    sequences = np.searchsorted(starts, tokens, side="right") - 1
    first_rows = cells % height * step + cells // height
    columns = (sequences, tokens - starts[sequences], first_rows, counts)
    runs = [
        (sequence, token + done, row + done * step, min(count - done, _BLOCK))
        for sequence, token, row, count in zip(*(c.tolist() for c in columns), strict=True)
        for done in range(0, count, _BLOCK)
    ]
    return sorted(runs, key=lambda run: run[2])


def _runs_of_layers(places: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """(layers of the target, layers of the source): neighbours are copied together."""
    begin = 0
    for end in range(1, len(places) + 1):
        if end == len(places) or places[end] != places[end - 1] + 1:
            yield slice(begin, end), slice(places[begin], places[end - 1] + 1)
            begin = end
