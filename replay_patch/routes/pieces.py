"""The pieces of one trajectory: put together, and cut. T tokens, L layers, K top-k.

A piece (a turn of a tool loop, a generation that was aborted and resumed) has a row of expert ids
for each of some consecutive tokens, and a flag that says whether the row was captured. What holds
of all pieces is `fill_holes`: the first captured row of a token counts, as its pass produced the
next token, and a hole is filled by a later piece. How a piece says which tokens it has differs:

* `Routes` have `start`, the number of tokens before the piece: the caller knows that both pieces
  are of the same tokens. `append` merges two of them.
* The calls of an agent loop have token ids, as the loop may cut or retokenise what it keeps.
  `trajectory.Trajectory` compares them with the tokens that were kept.
"""

from typing import Any, NoReturn

import torch
from numpy.typing import NDArray
from torch import Tensor

from replay_patch.errors import RouteError
from replay_patch.routes.arguments import check_word
from replay_patch.routes.expert_ids import MISMATCH, CheckedRoutes


def append(
    earlier: CheckedRoutes,
    later: CheckedRoutes,
    on_mismatch: str,
    on_gap: str,
    name: str | None = None,
) -> CheckedRoutes:
    """Both pieces as one; `earlier` itself if the later one has no row. See `Routes.append`."""
    check_word("on_mismatch", on_mismatch, "raise", "count")
    check_word("on_gap", on_gap, "raise", "hole")
    where = f"{name}: " if name else ""
    _check_axes(earlier, later, where)
    empty = _common_empty_layers(earlier, later, where)
    if not len(later.expert_ids):
        return earlier
    gap = later.start - earlier.end
    if earlier.start > later.end:
        raise RouteError(
            f"{where}the later piece ends at token {later.end}, and the earlier one begins at "
            f"{earlier.start}: expected pieces in order"
        )
    if gap > 1 and on_gap == "raise":
        raise RouteError(
            f"{where}the later piece begins at token {later.start}, and the earlier one ends at "
            f"{earlier.end}: {gap} tokens are in neither, and at most 1 was expected, the last "
            "sampled one. Was a turn lost? on_gap='hole' lets them route natively"
        )
    begin, end = min(earlier.start, later.start), max(earlier.end, later.end)
    ids = torch.zeros(end - begin, *earlier.expert_ids.shape[1:], dtype=earlier.expert_ids.dtype)
    captured = torch.zeros(end - begin, dtype=torch.bool)
    notes = torch.zeros(end - begin, dtype=torch.uint8)
    for piece in (earlier, later):
        rows = slice(piece.start - begin, piece.end - begin)
        into = ids[rows].numpy(), captured[rows].numpy()
        filled = fill_holes(*into, piece.expert_ids.numpy(), piece.captured.numpy())
        unexplained = ~captured[rows] & (notes[rows] == 0)  # holes
        causes = torch.zeros_like(notes[rows]) if piece.notes is None else piece.notes
        notes[rows] = torch.where(torch.from_numpy(filled) | unexplained, causes, notes[rows])
    both = range(max(earlier.start, later.start), min(earlier.end, later.end))
    if both:
        differing = _differing(earlier, later, both)
        if differing.any() and on_mismatch == "raise":
            _refuse_mismatch(earlier, later, both, differing, where)
        notes[both.start - begin : both.stop - begin].masked_fill_(differing, MISMATCH)
    axis = begin, earlier.layers, empty
    return CheckedRoutes(ids, captured, earlier.num_experts, *axis, notes if notes.any() else None)


def fill_holes(
    rows: NDArray[Any],
    captured: NDArray[Any],
    later_rows: NDArray[Any],
    later_captured: NDArray[Any],
) -> NDArray[Any]:
    """Take over the rows of a later piece where no earlier one has a captured row.

    Args:
        rows, captured: [T, L, K] and bool [T], of the pieces before; written to.
        later_rows: [T, L, K], of the same tokens. Ids are converted to the dtype of `rows`.
        later_captured: bool [T]; other rows of the piece are not read.

    Returns:
        bool [T], the rows that were taken over.
    """
    filled: NDArray[Any] = later_captured & ~captured
    if filled.all():  # one copy
        rows[:] = later_rows
    else:
        rows[filled] = later_rows[filled]
    captured |= filled
    return filled


def cut(routes: CheckedRoutes, rows: slice) -> CheckedRoutes:
    """Consecutive rows, as a copy that keeps nothing else alive; a RouteError for other slices."""
    if not isinstance(rows, slice) or rows.step not in (None, 1):
        raise RouteError(f"routes[{rows!r}]: expected a slice of consecutive rows, routes[a:b]")
    first, end, _ = rows.indices(len(routes.expert_ids))
    kept = slice(first, max(first, end))
    ids, captured = routes.expert_ids[kept].clone(), routes.captured[kept].clone()
    notes = None if routes.notes is None else routes.notes[kept].clone()
    if notes is not None and not notes.any():
        notes = None
    axis = routes.start + first, routes.layers, routes.empty_layers
    return CheckedRoutes(ids, captured, routes.num_experts, *axis, notes)


def _check_axes(earlier: CheckedRoutes, later: CheckedRoutes, where: str) -> None:
    """Raise RouteError unless both have the same experts, top-k and layers."""
    if not isinstance(later, CheckedRoutes):
        raise RouteError(f"{where}the later piece is a {type(later).__name__}: expected Routes")
    later_axes, expected = (
        (p.num_experts, p.expert_ids.shape[2], p.expert_ids.shape[1], p.layers)
        for p in (later, earlier)
    )
    if later_axes != expected:
        raise RouteError(
            f"{where}the later piece has (num_experts, topk, num_layers, layers) = {later_axes}: "
            f"expected {expected}, as the earlier one has"
        )


def _common_empty_layers(
    earlier: CheckedRoutes, later: CheckedRoutes, where: str
) -> tuple[int, ...]:
    """The empty layers of both together; a piece without a captured row has no say in it."""
    if earlier.empty_layers == later.empty_layers or not later.captured.any():
        return earlier.empty_layers
    if not earlier.captured.any():
        return later.empty_layers
    raise RouteError(
        f"{where}places {list(later.empty_layers)} of the layer axis hold nothing in the later "
        f"piece: expected {list(earlier.empty_layers)}, as in the earlier one"
    )


def _differing(earlier: CheckedRoutes, later: CheckedRoutes, tokens: range) -> Tensor:
    """bool [tokens]: captured in both, with other experts in some layer, whatever their order."""
    earlier_rows, later_rows = (
        slice(tokens.start - piece.start, tokens.stop - piece.start) for piece in (earlier, later)
    )
    earlier_ids, later_ids = earlier.expert_ids[earlier_rows], later.expert_ids[later_rows]
    differing = (earlier_ids != later_ids).any(2).any(1)
    differing &= earlier.captured[earlier_rows] & later.captured[later_rows]
    if differing.any():
        sorted_ids = (ids[differing].sort(2).values for ids in (earlier_ids, later_ids))
        differing[differing.clone()] = torch.ne(*sorted_ids).any(2).any(1)
    return differing


def _refuse_mismatch(
    earlier: CheckedRoutes, later: CheckedRoutes, tokens: range, differing: Tensor, where: str
) -> NoReturn:
    token = tokens[int(differing.nonzero()[0])]
    earlier_ids, later_ids = (p.expert_ids[token - p.start] for p in (earlier, later))
    unlike = (earlier_ids.sort(1).values != later_ids.sort(1).values).any(1)
    place = int(unlike.nonzero()[0])
    axis = earlier.layers
    layer = f"layer {axis[place]}" if isinstance(axis, tuple) else f"place {place}"
    raise RouteError(
        f"{where}token {token}, {layer} of the layer axis: the later piece has "
        f"{later_ids[place].tolist()}, expected {earlier_ids[place].tolist()} as the earlier one "
        f"has. {int(differing.sum()) - 1} more tokens differ. Prefill and decode, or new weights, "
        "may choose differently: on_mismatch='count' keeps the earlier rows"
    )
