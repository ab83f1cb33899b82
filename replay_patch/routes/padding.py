"""Rows that no route was captured for: which experts padding gets, and what is padding at all.
P rows of padding, L layers, E experts, K top-k, B sequences, S positions, T packed positions."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from replay_patch.errors import LayoutError, RouteError
from replay_patch.routes.routes import Routes
from replay_patch.routes.row_index import widest
from replay_patch.routes.token_layout import TokenLayout


class RouterMasks(NamedTuple):
    """bool [B, S] or [1, T] each, shaped as the model input; no position is True in both.

    Attributes:
        padding: no token at all. This is Megatron's `padding_mask`, where True = padding.
        holes: real tokens without a captured route. They route natively, and are no padding: in the
            mask they would drop out of the expert bias and of the auxiliary losses.
    """

    padding: Tensor
    holes: Tensor


def router_masks(routes: Sequence[Routes], layout: TokenLayout) -> RouterMasks:
    """What is padding in a rank's model input, and which of its tokens are holes. `routes` (a
    `RouteBatch` or a list) are one per sequence of the rank's `layout`, else a RouteError."""
    check_lengths(routes, layout.lengths)
    is_hole = torch.ones(layout.num_tokens, dtype=torch.bool)
    first = 0
    for trajectory, length in zip(routes, layout.lengths, strict=True):
        is_hole[first + trajectory.start : first + trajectory.end] = ~trajectory.captured
        first += length
    return RouterMasks(layout.padding_mask, layout.align(is_hole, False))


def check_lengths(routes: Sequence[Routes], lengths: Sequence[int]) -> None:
    """Raise RouteError unless there is one trajectory for each sequence of N tokens, and it ends
    after N or N - 1 tokens, those before `start` included."""
    if len(routes) != len(lengths):
        raise RouteError(f"routes of {len(routes)} sequences: the layout has {len(lengths)}")
    for number, (trajectory, length) in enumerate(zip(routes, lengths, strict=True)):
        if trajectory.end not in (length, length - 1):
            start = trajectory.start
            what = f"{trajectory.num_tokens} rows" + (f" from token {start} on" if start else "")
            raise RouteError(
                f"trajectory {number} has routes of {what}: expected to end after {length} tokens, "
                f"or after {length - 1}, as the last token of a rollout has no route"
            )


def fill_padding(
    ids: Tensor, rows: Tensor, num_experts: int, ep_size: int = 1, first: int = 0
) -> int:
    """Write distinct experts into rows of padding, so that no expert and no rank gets more than
    others. Any run of consecutive choices differs by at most one between two experts, and between
    two expert-parallel ranks; so does what is in one layer, and what is in all of them.

    Args:
        ids: [L, R, K] on the host, written to. A RouteError if K is more than E, a LayoutError if
            the dtype cannot hold the experts.
        rows: int64 [P], those of padding.
        ep_size: expert-parallel ranks; rank r has experts r * E / ep_size and the following. A
            RouteError if they cannot share the experts equally.
        first: how many choices were made before; each layer goes on where the last one ended.

    Returns:
        `first` of the next call.
    """
    num_layers, _, topk = ids.shape
    if not 1 <= topk <= num_experts:
        raise RouteError(f"top-k {topk}: expected 1 to {num_experts}, distinct experts for a row")
    if num_experts - 1 > torch.iinfo(ids.dtype).max:
        raise LayoutError(f"ids of dtype {ids.dtype} cannot hold expert {num_experts - 1}")
    if ep_size < 1 or num_experts % ep_size:
        raise RouteError(f"{num_experts} experts over {ep_size} ranks: expected an equal number")
    size = len(rows) * topk
    if not size:
        return first
    element = widest(ids)
    wide = ids.view(element)
    choices = _cycle(num_experts, ep_size, size).to(ids.dtype)
    for layer in range(num_layers):
        begin = (first + layer * size) % num_experts
        chosen = choices[begin : begin + size].clone().view(-1, topk)
        wide[layer].index_copy_(0, rows, chosen.view(element))
    return first + num_layers * size


def _cycle(num_experts: int, ep_size: int, size: int) -> Tensor:
    """int64 [size + E]: each expert once, rank after rank in turn, over and over."""
    once = torch.arange(num_experts).view(ep_size, -1).t().flatten()
    return once.repeat(-(-(size + num_experts) // num_experts))[: size + num_experts]
