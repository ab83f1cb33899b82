"""Per-token values through a layout and back: against plain Python, and known cases."""

from typing import Any

import numpy as np
import pytest
import torch
from helpers import token_layouts
from helpers.token_layouts import Case
from hypothesis import given, settings

from replay_patch import LayoutError, TokenLayout

FILL = -7


def values_of(case: Case, kind: str) -> Any:
    """Two numbers for each token: 10 * token + 1 and + 2."""
    tokens = torch.arange(sum(case.lengths), dtype=torch.int32)
    values = torch.stack([10 * tokens + 1, 10 * tokens + 2], dim=1)
    return values.numpy() if kind == "array" else values


def at(tokens: Any) -> Any:
    """What a position with that token should get."""
    if isinstance(tokens, list):
        return [at(token) for token in tokens]
    return [FILL, FILL] if tokens == -1 else [10 * tokens + 1, 10 * tokens + 2]


def next_of(case: Case) -> list[list[int]]:
    """The inputs of the rank with the token that follows in its sequence, from anywhere."""
    following = {-1: -1}
    for sequence in case.sequences:
        tokens = [token for token in sequence if token != -1]
        following |= dict(zip(tokens, [*tokens[1:], -1], strict=False))
    return [[following[token] for token in row] for row in case.inputs]


def stacked(kind: str, ranks: list[Any]) -> Any:
    """What comes back from the context-parallel ranks."""
    if len(ranks) == 1:
        return ranks[0]
    return np.stack(ranks) if kind == "array" else torch.stack(ranks)


@pytest.mark.parametrize("kind", ["array", "tensor"])
@settings(max_examples=150, deadline=None)
@given(case=token_layouts.cases)
def test_values_go_where_their_tokens_are(kind: str, case: Case) -> None:
    layout, values = case.make(), values_of(case, kind)

    aligned = layout.align(values, FILL)
    rows = layout.align_rows(values, FILL)
    shifted = layout.shift_next_token(values, FILL)

    shape = (*layout.input_rows.shape, 2)
    assert aligned.tolist() == at(case.inputs)
    assert rows.tolist() == at(case.rows)
    assert shifted.tolist() == at(next_of(case))
    for made in (aligned, rows, shifted):
        assert type(made) is type(values)
        assert made.dtype == values.dtype
    assert tuple(aligned.shape) == tuple(shifted.shape) == shape


@pytest.mark.parametrize("kind", ["array", "tensor"])
@settings(max_examples=150, deadline=None)
@given(case=token_layouts.cases)
def test_restore_is_the_way_back(kind: str, case: Case) -> None:
    values = values_of(case, kind)
    ranks = [rank.make().align(values, FILL) for rank in case.ranks()]

    back = case.make().restore(stacked(kind, ranks))

    assert type(back) is type(values)
    assert back.dtype == values.dtype
    assert back.tolist() == values.tolist()


# --- labels -----------------------------------------------------------------------------------


def test_labels_of_packed_sequences_end_with_each_of_them() -> None:
    layout = TokenLayout.packed([3, 0, 2], align=4)

    labels = layout.shift_next_token(torch.tensor([10, 11, 12, 20, 21]), -100)

    assert labels.tolist() == [[11, 12, -100, -100, 21, -100, -100, -100]]


def test_a_label_may_be_on_another_rank() -> None:
    tokens = torch.arange(10, 18)
    ranks = [TokenLayout.packed([8], cp_size=2, cp_rank=rank) for rank in range(2)]

    labels = [layout.shift_next_token(tokens, -100)[0].tolist() for layout in ranks]

    assert [layout.align(tokens, 0)[0].tolist() for layout in ranks] == [
        [10, 11, 16, 17],
        [12, 13, 14, 15],
    ]
    assert labels == [[11, 12, 17, -100], [13, 14, 15, 16]]


@pytest.mark.parametrize("side", ["left", "right"])
def test_labels_of_a_padded_input(side: str) -> None:
    layout = TokenLayout.padded([3, 1], 4, padding_side=side)
    tokens = torch.tensor([10, 11, 12, 20])

    labels = layout.shift_next_token(layout.align(tokens, 0), -100)

    assert torch.equal(layout.shift_next_token(tokens, -100), labels)
    assert labels[0].tolist() == ([11, 12, -100, -100] if side == "right" else [-100, 11, 12, -100])
    assert labels[1].tolist() == [-100] * 4


def test_one_value_for_each_token_is_taken_as_that() -> None:
    layout = TokenLayout.packed([1, 1], pad_to=2)

    assert layout.shift_next_token(torch.ones(2, 2), 0).shape == (1, 2, 2)


# --- dtypes, devices, gradients ---------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.int16, torch.int64, torch.bfloat16, torch.float64],
    ids=str,
)
def test_the_dtype_is_kept(dtype: torch.dtype) -> None:
    layout = TokenLayout.packed([1, 2], align=2)
    values = torch.ones(3, dtype=dtype)

    aligned = layout.align(values, 0)

    assert aligned.dtype is dtype
    assert aligned.tolist() == [[1, 0, 1, 1]]


def test_values_are_not_looked_at() -> None:
    """What has no memory cannot have been read: no step here waits for a device."""
    layout = TokenLayout.packed([3, 5], align=4, tp_size=2, sequence_parallel=True)
    values = torch.empty(8, 2, device="meta")

    aligned = layout.align(values, 0.0)

    assert layout.align_rows(values, 0.0).shape == (6, 2)
    assert layout.shift_next_token(values, 0.0).shape == aligned.shape == (1, 12, 2)
    assert layout.restore(aligned).shape == (8, 2)
    assert aligned.device.type == "meta"


def test_gradients_come_back_to_the_tokens() -> None:
    layout = TokenLayout.packed([2, 1], align=2)
    values = torch.ones(3, requires_grad=True)

    (layout.restore(layout.align(values, 0.0)) * torch.tensor([1.0, 2.0, 3.0])).sum().backward()

    assert values.grad is not None
    assert values.grad.tolist() == [1.0, 2.0, 3.0]


def test_no_real_tokens() -> None:
    layout = TokenLayout.packed([0], pad_to=2)

    assert layout.align(torch.ones(0, 3), 5).tolist() == [[[5.0] * 3] * 2]
    assert layout.align(np.ones(0), 5).tolist() == [[5.0, 5.0]]
    assert layout.restore(torch.ones(1, 2)).tolist() == []
    assert TokenLayout.padded([], 2).align(torch.ones(0), 0).shape == (0, 2)


# --- what is refused --------------------------------------------------------------------------

LAYOUT = TokenLayout.packed([2, 1], align=2)
CP = TokenLayout.packed([4], cp_size=2)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: LAYOUT.align(torch.ones(4), 0), r"shape \[4\]: expected \[3, ...\]"),
        (lambda: LAYOUT.align_rows(torch.ones(()), 0), r"shape \[\]: expected \[3, ...\]"),
        (lambda: LAYOUT.align([1, 2, 3], 0), "list: expected a tensor or an array"),
        (lambda: LAYOUT.align(torch.ones(3).to_sparse(), 0), "sparse"),
        (lambda: LAYOUT.restore(torch.ones(3)), r"shape \[3\]: expected \[1, 4\]"),
        (lambda: CP.restore(torch.ones(1, 2)), r"expected \[2, 1, 2\].*stack what all_gather"),
        (lambda: CP.shift_next_token(torch.ones(1, 2), 0), r"expected \[4, ...\]"),
        (lambda: LAYOUT.align(torch.ones(3, dtype=torch.uint8), -1), "fill=-1.*torch.uint8"),
        (lambda: LAYOUT.align(torch.ones(3, dtype=torch.int16), 40000), "fill=40000"),
        (lambda: LAYOUT.align(torch.ones(3, dtype=torch.int64), 0.5), "fill=0.5"),
        (lambda: LAYOUT.align(torch.ones(3, dtype=torch.int64), float("nan")), "fill=nan"),
        (lambda: LAYOUT.align(torch.ones(3, dtype=torch.bool), 2), "fill=2"),
        (lambda: LAYOUT.align(torch.ones(3), None), "fill=None"),
        (lambda: LAYOUT.align(np.ones(3, dtype=np.uint8), 256), "fill=256.*uint8"),
        (lambda: LAYOUT.align(torch.ones(3).to(torch.uint16), 0), "uint16, for which torch lacks"),
    ],
)
def test_refused(call: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        call()


def test_a_fill_that_nothing_gets_is_not_looked_at() -> None:
    assert TokenLayout.packed([2]).align(torch.ones(2, dtype=torch.uint8), -1).tolist() == [[1, 1]]
