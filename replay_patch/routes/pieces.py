"""Pieces of one trajectory, put together and cut. T tokens, L layers, K top-k."""

import torch
from torch import Tensor

from replay_patch.errors import RouteError
from replay_patch.routes.expert_ids import MISMATCH, Parts, policy


def append(
    earlier: Parts, later: Parts, on_mismatch: str, on_gap: str, name: str | None = None
) -> Parts:
    """See `Routes.append`."""
    policy("on_mismatch", on_mismatch, "raise", "count")
    policy("on_gap", on_gap, "raise", "hole")
    where = f"{name}: " if name else ""
    empty = _empty_layers(earlier, later, where)
    if not len(later.expert_ids):
        return earlier
    (first, first_end), (second, second_end) = _span(earlier), _span(later)
    gap = second - first_end
    if first > second_end:
        raise RouteError(
            f"{where}the later piece ends at token {second_end}, and the earlier one begins at "
            f"{first}: expected pieces in order"
        )
    if gap > 1 and on_gap == "raise":
        raise RouteError(
            f"{where}the later piece begins at token {second}, and the earlier one ends at "
            f"{first_end}: {gap} tokens are in neither, and at most 1 was expected, the last "
            "sampled one. Was a turn lost? on_gap='hole' lets them route natively"
        )
    begin, end = min(first, second), max(first_end, second_end)
    ids = torch.zeros(end - begin, *earlier.expert_ids.shape[1:], dtype=earlier.expert_ids.dtype)
    captured = torch.zeros(end - begin, dtype=torch.bool)
    notes = torch.zeros(end - begin, dtype=torch.uint8)
    for piece, at in ((later, second - begin), (earlier, first - begin)):
        place = slice(at, at + len(piece.expert_ids))
        ids[place], captured[place] = piece.expert_ids, piece.captured
        notes[place] = 0 if piece.notes is None else piece.notes
    both = slice(max(first, second), min(first_end, second_end))
    if both.start < both.stop:
        mine, new = _rows(earlier, both), _rows(later, both)
        differing = _differing(mine, new)
        if differing.any() and on_mismatch == "raise":
            _refuse(mine, new, differing, both.start, where)
        place = slice(both.start - begin, both.stop - begin)
        filled = new.captured & ~mine.captured
        if filled.any():
            ids[place] = torch.where(filled[:, None, None], new.expert_ids, mine.expert_ids)
            captured[place] |= filled
        if new.notes is not None or filled.any():
            silent = ~mine.captured & (notes[place] == 0)
            other = torch.zeros_like(notes[place]) if new.notes is None else new.notes
            notes[place] = torch.where(filled | silent, other, notes[place])
        notes[place].masked_fill_(differing, MISMATCH)
    return Parts(
        ids,
        captured,
        earlier.num_experts,
        begin,
        earlier.layers,
        empty,
        notes if notes.any() else None,
    )


def cut(routes: Parts, rows: slice) -> Parts:
    """Consecutive rows, as a copy that keeps nothing else alive."""
    if not isinstance(rows, slice) or rows.step not in (None, 1):
        raise RouteError(f"routes[{rows!r}]: expected a slice of consecutive rows, routes[a:b]")
    first, end, _ = rows.indices(len(routes.expert_ids))
    kept = slice(first, max(first, end))
    if routes.notes is None or not routes.notes[kept].any():
        notes = None
    else:
        notes = routes.notes[kept].clone()
    return Parts(
        routes.expert_ids[kept].clone(),
        routes.captured[kept].clone(),
        routes.num_experts,
        routes.start + first,
        routes.layers,
        routes.empty_layers,
        notes,
    )


def _span(piece: Parts) -> tuple[int, int]:
    return piece.start, piece.start + len(piece.expert_ids)


def _rows(piece: Parts, tokens: slice) -> Parts:
    """These tokens of a piece, as views."""
    rows = slice(tokens.start - piece.start, tokens.stop - piece.start)
    return Parts(
        piece.expert_ids[rows],
        piece.captured[rows],
        piece.num_experts,
        tokens.start,
        piece.layers,
        piece.empty_layers,
        None if piece.notes is None else piece.notes[rows],
    )


def _differing(one: Parts, other: Parts) -> Tensor:
    """bool [T]: captured in both, with other experts in some layer; columns may be in any order."""
    differing = (one.expert_ids != other.expert_ids).any(2).any(1) & one.captured & other.captured
    if differing.any():
        pair = (piece.expert_ids[differing].sort(2).values for piece in (one, other))
        differing[differing.clone()] = torch.ne(*pair).any(2).any(1)
    return differing


def _empty_layers(earlier: Parts, later: Parts, where: str) -> tuple[int, ...]:
    """The empty layers of both, which are pieces of one trajectory."""
    if not isinstance(later, Parts):
        raise RouteError(f"{where}the later piece is a {type(later).__name__}: expected Routes")
    found, expected = (
        (p.num_experts, p.expert_ids.shape[2], p.expert_ids.shape[1], p.layers)
        for p in (later, earlier)
    )
    if found != expected:
        raise RouteError(
            f"{where}the later piece has (num_experts, topk, num_layers, layers) = {found}: "
            f"expected {expected}, as the earlier one has"
        )
    if earlier.empty_layers == later.empty_layers or not later.captured.any():
        return earlier.empty_layers
    if not earlier.captured.any():
        return later.empty_layers
    raise RouteError(
        f"{where}places {list(later.empty_layers)} of the layer axis hold nothing in the later "
        f"piece: expected {list(earlier.empty_layers)}, as in the earlier one"
    )


def _refuse(one: Parts, other: Parts, differing: Tensor, first: int, where: str) -> None:
    token = int(differing.nonzero()[0])
    mine, new = one.expert_ids[token].sort(1).values, other.expert_ids[token].sort(1).values
    place = int((mine != new).any(1).nonzero()[0])
    layer = f"layer {one.layers[place]}" if isinstance(one.layers, tuple) else f"place {place}"
    raise RouteError(
        f"{where}token {first + token}, {layer} of the layer axis: the later piece has "
        f"{other.expert_ids[token, place].tolist()}, expected "
        f"{one.expert_ids[token, place].tolist()} as the earlier one has. "
        f"{int(differing.sum()) - 1} more tokens differ. Prefill and decode, or new weights, may "
        "choose differently: on_mismatch='count' keeps the earlier rows"
    )
