"""Where the tokens of a microbatch are: against a reference in plain Python, and known cases."""

from typing import Any

import pytest
import torch
from helpers import token_layouts
from helpers.token_layouts import Case
from hypothesis import given, settings

from replay_patch import LayoutError, TokenLayout


@settings(max_examples=300, deadline=None)
@given(token_layouts.cases)
def test_every_position_and_row_has_its_token(case: Case) -> None:
    layout = case.make()

    assert layout.input_rows.tolist() == case.inputs
    assert layout.rows.tolist() == case.rows
    assert layout.input_rows.dtype == layout.rows.dtype == torch.int64
    assert layout.padding_mask.tolist() == [[token == -1 for token in row] for row in case.inputs]
    assert layout.padding_mask.dtype is torch.bool
    assert layout.lengths == tuple(case.lengths)
    assert layout.padded_lengths == tuple(case.sizes)
    assert layout.num_tokens == sum(case.lengths)


@settings(max_examples=60, deadline=None)
@given(token_layouts.cases)
def test_every_token_is_on_one_rank(case: Case) -> None:
    tp_ranks = range(case.cut["tp_size"] if case.cut["sequence_parallel"] else 1)
    rows = [
        case.on(c, t).make().rows.tolist() for c in range(case.cut["cp_size"]) for t in tp_ranks
    ]

    tokens = sorted(token for rank in rows for token in rank if token >= 0)
    assert tokens == list(range(sum(case.lengths)))
    assert len({len(rank) for rank in rows}) == 1


# --- reported cases ---------------------------------------------------------------------------


def test_rows_are_sequence_major() -> None:  # 45
    assert TokenLayout.padded([3, 3], 3).rows.tolist() == [0, 3, 1, 4, 2, 5]


@pytest.mark.parametrize(
    "layout, expected", [("zigzag", [0, 1, 6, 7]), ("contiguous", [0, 1, 2, 3])]
)
def test_the_cut_over_context_parallel_ranks(layout: str, expected: list[int]) -> None:  # 46
    cut = {"cp_size": 2, "cp_rank": 0, "cp_layout": layout}

    assert TokenLayout.packed([8], **cut).rows.tolist() == expected
    assert TokenLayout.padded([8], 8, **cut).rows.tolist() == expected


def test_padding_of_each_sequence_stays_with_it() -> None:  # 51
    layout = TokenLayout.packed([3, 5], align=4)

    assert layout.rows.tolist() == [0, 1, 2, -1, 3, 4, 5, 6, 7, -1, -1, -1]
    assert layout.padding_mask.nonzero()[:, 1].tolist() == [3, 9, 10, 11]


def test_every_sample_starts_where_the_model_has_it() -> None:  # 44
    assert TokenLayout.packed([3, 2]).rows.tolist() == [0, 1, 2, 3, 4]


def test_alignment_counts_rows_and_not_elements() -> None:  # 47
    ranks = [TokenLayout.packed([1], align=4, cp_size=2, cp_rank=rank) for rank in range(2)]
    ids = torch.ones(1, 48, 8, dtype=torch.uint8)

    assert [layout.align(ids, 0).shape for layout in ranks] == [(1, 2, 48, 8)] * 2
    assert [layout.align_rows(ids, 0).sum() for layout in ranks] == [48 * 8, 0]


def test_lengths_of_nested_tensors() -> None:  # 50
    nested = torch.nested.as_nested_tensor([torch.ones(3), torch.ones(1)], layout=torch.jagged)

    assert TokenLayout.packed(nested.offsets().diff()).lengths == (3, 1)


def test_padding_for_low_precision_is_a_number() -> None:  # 49
    assert len(TokenLayout.packed([100], pad_to=128).rows) == 128
    assert len(TokenLayout.packed([100], total_align=128).rows) == 128


def test_the_mask_is_not_cut_for_sequence_parallelism() -> None:  # 52
    layout = TokenLayout.padded([5], 8, tp_size=2, tp_rank=1, sequence_parallel=True)

    assert layout.rows.tolist() == [4, -1, -1, -1]
    assert layout.padding_mask.shape == layout.input_rows.shape == (1, 8)


def test_without_sequence_parallelism_a_tensor_parallel_rank_has_all_rows() -> None:
    layout = TokenLayout.packed([4], tp_size=2, tp_rank=1)

    assert layout.rows.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("rank, expected", [(0, [0, -1]), (1, [-1, -1])])
def test_a_sequence_shorter_than_the_cut(rank: int, expected: list[int]) -> None:
    assert TokenLayout.packed([1], cp_size=2, cp_rank=rank).rows.tolist() == expected


def test_no_tokens_at_all() -> None:
    assert TokenLayout.packed([0, 0]).rows.tolist() == []
    assert TokenLayout.packed([], pad_to=2).rows.tolist() == [-1, -1]
    assert TokenLayout.padded([0], 2).rows.tolist() == [-1, -1]
    assert TokenLayout.padded([], 2).input_rows.shape == (0, 2)


# --- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: TokenLayout.padded([5], 4), "sequence 0 has 5 tokens.* at most 4"),
        (lambda: TokenLayout.padded([2], 4, padding_side="top"), "'left' or 'right'"),
        (lambda: TokenLayout.packed([5], pad_to=4), "pad_to=4.* 5 positions"),
        (lambda: TokenLayout.packed([5], pad_to=12, total_align=8), "multiple of total_align=8"),
        (lambda: TokenLayout.packed([5], align=0), "align is 0"),
        (lambda: TokenLayout.packed([5], align=2, cp_size=2), "6 .*multiple of 4"),
        (
            lambda: TokenLayout.packed([5], align=1, tp_size=2, sequence_parallel=True),
            "5 positions .*tp_size=2",
        ),
        (lambda: TokenLayout.packed([5], tp_size=2, tp_rank=2), "tp_rank=2: expected 0 to 1"),
        (lambda: TokenLayout.packed([5], cp_rank=-1), "cp_rank is -1"),
        (lambda: TokenLayout.packed([5], cp_size=2, cp_layout="ring"), "cp_layout='ring'"),
        (lambda: TokenLayout.packed([-1]), r"lengths\[0\] is -1"),
        (lambda: TokenLayout.packed([1.5]), r"lengths\[0\] is 1.5"),
        (lambda: TokenLayout.packed([True]), r"lengths\[0\] is True"),
        (lambda: TokenLayout.packed(3), "lengths=3"),
    ],
)
def test_refused(make: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        make()


def test_lengths_on_a_device_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"lengths is on meta.*host integers"):
        TokenLayout.packed(torch.ones(2, dtype=torch.int64, device="meta"))


def test_a_layout_has_lengths_from_host_tensors() -> None:
    assert TokenLayout.packed(torch.tensor([2, 1])).lengths == (2, 1)
