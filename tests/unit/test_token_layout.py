"""Where the tokens of a microbatch are: against a reference in plain Python, and known cases."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replay_patch import LayoutError, TokenLayout


def chunk_of(positions: list[int], size: int, rank: int, layout: str) -> list[int]:
    """What context parallelism leaves of some positions on one rank."""
    pieces = 2 * size if layout == "zigzag" and size > 1 else size
    step = len(positions) // pieces
    cut = [positions[i * step : (i + 1) * step] for i in range(pieces)]
    return cut[rank] + (cut[-1 - rank] if pieces > size else [])


def reference(
    sequences: list[list[int]], packed: bool, cut: dict[str, Any]
) -> tuple[list[list[int]], list[int]]:
    """(input rows, router rows) of padded sequences of token numbers."""
    cp = cut["cp_size"], cut["cp_rank"], cut["cp_layout"]
    if packed and cut["cp_layout"] == "zigzag":
        parts = [chunk_of(sequence, *cp) for sequence in sequences]
        inputs = [list(itertools.chain.from_iterable(parts))]
    elif packed:
        inputs = [chunk_of(list(itertools.chain.from_iterable(sequences)), *cp)]
    else:
        inputs = [chunk_of(sequence, *cp) for sequence in sequences]
    positions = list(range(len(inputs[0]) if inputs else 0))
    if cut["sequence_parallel"]:
        step = len(positions) // cut["tp_size"]
        positions = positions[cut["tp_rank"] * step : (cut["tp_rank"] + 1) * step]
    return inputs, [sequence[at] for at in positions for sequence in inputs]


def numbered(lengths: list[int]) -> list[list[int]]:
    tokens = itertools.count()
    return [[next(tokens) for _ in range(length)] for length in lengths]


def up(number: int, multiple: int) -> int:
    return next(n for n in itertools.count(number) if n % multiple == 0)


def default_align(cut: dict[str, Any]) -> int:
    zigzag = cut["cp_layout"] == "zigzag" and cut["cp_size"] > 1
    return int(cut["tp_size"] * (2 * cut["cp_size"] if zigzag else cut["cp_size"]))


@st.composite
def cuts(draw: Any) -> dict[str, Any]:
    tp_size, cp_size = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return {
        "tp_size": tp_size,
        "tp_rank": draw(st.integers(0, tp_size - 1)),
        "sequence_parallel": draw(st.booleans()),
        "cp_size": cp_size,
        "cp_rank": draw(st.integers(0, cp_size - 1)),
        "cp_layout": draw(st.sampled_from(["zigzag", "contiguous"])),
    }


some_lengths = st.lists(st.integers(0, 9), min_size=1, max_size=5)


@settings(max_examples=150, deadline=None)
@given(some_lengths, st.integers(0, 4), st.sampled_from(["left", "right"]), cuts(), st.data())
def test_padded(lengths: list[int], more: int, side: str, cut: dict[str, Any], data: Any) -> None:
    align = data.draw(st.sampled_from([None, default_align(cut) * 2]))
    size = up(max(lengths) + more, align or default_align(cut))
    padding = [[-1] * (size - length) for length in lengths]
    sequences = [
        tokens + empty if side == "right" else empty + tokens
        for tokens, empty in zip(numbered(lengths), padding, strict=True)
    ]

    layout = TokenLayout.padded(lengths, max(lengths) + more, padding_side=side, align=align, **cut)

    check(layout, reference(sequences, False, cut), lengths, [size] * len(lengths))


@settings(max_examples=150, deadline=None)
@given(some_lengths, cuts(), st.data())
def test_packed(lengths: list[int], cut: dict[str, Any], data: Any) -> None:
    least = default_align(cut)
    align = data.draw(st.sampled_from([None, 2 * least]))
    total_align = data.draw(st.sampled_from([None, 4 * least]))
    sizes = [up(length, align or least) for length in lengths]
    total = up(sum(sizes), total_align or 1)
    pad_to = data.draw(st.sampled_from([None, total, total + 4 * least]))
    sizes[-1] += (pad_to or total) - sum(sizes)
    sequences = [
        tokens + [-1] * (size - len(tokens))
        for tokens, size in zip(numbered(lengths), sizes, strict=True)
    ]

    layout = TokenLayout.packed(lengths, align=align, total_align=total_align, pad_to=pad_to, **cut)

    check(layout, reference(sequences, True, cut), lengths, sizes)


def check(
    layout: TokenLayout,
    expected: tuple[list[list[int]], list[int]],
    lengths: list[int],
    sizes: list[int],
) -> None:
    inputs, rows = expected
    assert layout.input_rows.tolist() == inputs
    assert layout.rows.tolist() == rows
    assert layout.input_rows.dtype == layout.rows.dtype == torch.int64
    assert layout.padding_mask.tolist() == [[token == -1 for token in row] for row in inputs]
    assert layout.padding_mask.dtype is torch.bool
    assert (layout.lengths, layout.padded_lengths) == (tuple(lengths), tuple(sizes))
    assert layout.num_tokens == sum(lengths)


@settings(max_examples=60, deadline=None)
@given(some_lengths, cuts(), st.booleans())
def test_every_token_is_on_one_rank(lengths: list[int], cut: dict[str, Any], packed: bool) -> None:
    def on(cp_rank: int, tp_rank: int) -> TokenLayout:
        where = cut | {"cp_rank": cp_rank, "tp_rank": tp_rank}
        if packed:
            return TokenLayout.packed(lengths, **where)
        return TokenLayout.padded(lengths, max(lengths), **where)

    tp_ranks = range(cut["tp_size"] if cut["sequence_parallel"] else 1)
    rows = [on(c, t).rows.tolist() for c in range(cut["cp_size"]) for t in tp_ranks]

    tokens = sorted(token for rank in rows for token in rank if token >= 0)
    assert tokens == list(range(sum(lengths)))
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
