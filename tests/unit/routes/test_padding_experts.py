"""Experts for padding, and what is padding at all."""

from collections import Counter

import pytest
import torch
from helpers.token_layouts import padding_ids
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from replay_patch import LayoutError, RouteBatch, RouteError, Routes, TokenLayout
from replay_patch.routes.padding import fill_padding, router_masks


def spread(choices: Tensor, kinds: int) -> int:
    """How many more choices one kind has than another."""
    counts = Counter(choices.flatten().tolist())
    assert set(counts) <= set(range(kinds))
    return max(counts.get(k, 0) for k in range(kinds)) - min(counts.get(k, 0) for k in range(kinds))


@settings(max_examples=200, deadline=None)
@given(
    ranks=st.integers(1, 8),
    local=st.integers(1, 8),
    topk=st.integers(1, 8),
    num_rows=st.integers(0, 20),
    num_layers=st.integers(0, 4),
    first=st.integers(0, 10**6),
)
def test_padding_is_spread_evenly(
    ranks: int, local: int, topk: int, num_rows: int, num_layers: int, first: int
) -> None:
    experts = ranks * local
    topk = min(topk, experts)

    ids = padding_ids(num_layers, num_rows, topk, experts, ranks, first)

    assert ids.shape == (num_layers, num_rows, topk)
    assert all(len(set(row)) == topk for layer in ids.tolist() for row in layer)
    for some in [ids, *ids]:
        assert spread(some, experts) <= 1
        assert spread(some.int() // local, ranks) <= 1


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=6), st.sampled_from([1, 2, 4]))
def test_microbatches_go_on_where_the_last_one_ended(rows: list[int], ranks: int) -> None:
    first, made = 3, []
    for count in rows:
        ids = torch.zeros(2, count + 1, 3, dtype=torch.uint8)
        first = fill_padding(ids, torch.arange(count), 8, ranks, first)
        made.append(ids[:, :count].flatten())

    choices = torch.cat(made or [torch.zeros(0)])
    assert first == 3 + len(choices)
    assert spread(choices, 8) <= 1


def test_padding_does_not_all_go_to_one_rank() -> None:  # 53
    ids = padding_ids(num_layers=4, num_rows=4, topk=8, num_experts=64, ep_size=8)

    for layer in ids:
        assert Counter((layer // 8).flatten().tolist()) == dict.fromkeys(range(8), 4)


@pytest.mark.parametrize(
    "num_experts, dtype",
    [(256, torch.uint8), (257, torch.int16), (32768, torch.int16), (32769, torch.int32)],
)
def test_no_expert_wraps_around_in_a_small_dtype(num_experts: int, dtype: torch.dtype) -> None:
    ids = padding_ids(1, num_experts, 1, num_experts)

    assert ids.dtype is dtype
    assert ids.flatten().tolist() == list(range(num_experts))


def test_it_is_the_same_each_time() -> None:
    assert torch.equal(padding_ids(2, 5, 3, 8, 2, 7), padding_ids(2, 5, 3, 8, 2, 7))


def test_rows_that_are_no_padding_are_left_alone() -> None:
    ids = torch.full((2, 4, 2), 9, dtype=torch.uint8)

    fill_padding(ids, torch.tensor([1, 3]), 4)

    assert ids[:, [0, 2]].unique().tolist() == [9]
    assert ids[:, [1, 3]].tolist() == [[[0, 1], [2, 3]], [[0, 1], [2, 3]]]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((1, 2, 5, 4), "top-k 5: expected 1 to 4"),
        ((1, 2, 0, 4), "top-k 0"),
        ((1, 2, 2, 8, 3), "8 experts over 3 ranks"),
    ],
)
def test_what_cannot_be_balanced_is_refused(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(RouteError, match=message):
        padding_ids(*arguments)


def test_ids_too_narrow_for_the_experts_are_refused() -> None:
    with pytest.raises(LayoutError, match="uint8 cannot hold expert 299"):
        fill_padding(torch.zeros(1, 2, 2, dtype=torch.uint8), torch.tensor([0]), 300)


# --- padding and holes ------------------------------------------------------------------------


def routes(tokens: int, captured: list[bool] | None = None, start: int = 0) -> Routes:
    ids = torch.tensor([[[1, 2]]]).expand(tokens, 1, 2)
    return Routes(ids, 8, captured=captured, start=start)


def test_holes_are_no_padding() -> None:
    batch = RouteBatch([routes(3, [True, False, True]), routes(1)])

    packed = router_masks(batch, TokenLayout.packed([4, 2], align=4))
    padded = router_masks(batch, TokenLayout.padded([4, 2], 5))

    assert packed.padding.int().tolist() == [[0, 0, 0, 0, 0, 0, 1, 1]]
    assert packed.holes.int().tolist() == [[0, 1, 0, 1, 0, 1, 0, 0]]  # no route of the last tokens
    assert padded.padding.int().tolist() == [[0, 0, 0, 0, 1], [0, 0, 1, 1, 1]]
    assert padded.holes.int().tolist() == [[0, 1, 0, 1, 0], [0, 1, 0, 0, 0]]
    for masks in (packed, padded):
        assert masks.holes.sum() == 3


def test_left_padding() -> None:
    masks = router_masks([routes(1)], TokenLayout.padded([2], 4, padding_side="left"))

    assert masks.padding.tolist() == [[True, True, False, False]]  # True = padding
    assert masks.holes.tolist() == [[False, False, False, True]]


def test_a_piece_that_starts_later_has_holes_before() -> None:
    masks = router_masks([routes(2, start=1)], TokenLayout.packed([3]))

    assert masks.holes.tolist() == [[True, False, False]]


def test_masks_are_of_this_context_parallel_rank() -> None:
    batch = [routes(7)]
    ranks = [TokenLayout.packed([8], cp_size=2, cp_rank=rank) for rank in range(2)]

    holes = [router_masks(batch, layout).holes.tolist() for layout in ranks]

    assert holes == [[[False, False, False, True]], [[False] * 4]]


@pytest.mark.parametrize(
    "batch, message",
    [
        ([], "routes of 0 sequences: the layout has 1"),
        ([routes(5)], "trajectory 0 has routes of 5 rows: expected to end after 8 tokens"),
        ([routes(3, start=3)], "3 rows from token 3 on"),
        ([routes(9)], "9 rows"),
    ],
)
def test_routes_that_do_not_fit_are_refused(batch: list[Routes], message: str) -> None:
    with pytest.raises(RouteError, match=message):
        router_masks(batch, TokenLayout.packed([8]))
