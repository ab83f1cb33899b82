"""What a load hands to routers: ids in row order, and experts for rows of padding."""

import numpy as np
import pytest
import torch

from replay_patch import Routes, TokenLayout
from replay_patch.microbatch import padding_ids, replayed
from replay_patch.report import Report


@pytest.mark.parametrize("experts, topk, ranks", [(8, 2, 4), (64, 8, 8), (6, 4, 3), (7, 3, 1)])
@pytest.mark.parametrize("rows", [1, 4, 9])
@pytest.mark.parametrize("first", [0, 5])
def test_padding_is_spread_over_experts_and_ranks(
    experts: int, topk: int, ranks: int, rows: int, first: int
) -> None:
    ids = padding_ids(3, rows, topk, experts, ranks, first)

    assert ids.shape == (3, rows, topk)
    assert (np.sort(ids, axis=2)[..., 1:] > np.sort(ids, axis=2)[..., :-1]).all()
    for layer in [*ids, ids]:  # in each layer, and in all together
        of_expert = np.bincount(layer.ravel(), minlength=experts)
        of_rank = np.bincount(layer.ravel() // (experts // ranks), minlength=ranks)
        assert np.ptp(of_expert) <= 1
        assert np.ptp(of_rank) <= 1


def test_ids_come_in_the_order_of_router_rows() -> None:
    layout = TokenLayout.padded([3, 2], 4)
    tokens = torch.arange(10, 15)  # the number of a token, in each layer another column order
    ids = torch.stack([tokens, tokens + 100], dim=1)
    routes = [
        Routes(torch.stack([part, part + 1], dim=2), 200, captured=known)
        for part, known in zip((ids[:3], ids[3:4]), ([True, False, True], [True]), strict=True)
    ]

    made = replayed(
        routes, [3, 2], layout.rows, 200, 2, torch.device("cpu"), True, np.zeros((2, 3, 2))
    )

    hole, pad = 0, 0
    assert made.ids[0][:, 0].tolist() == [10, 13, hole, hole, 12, pad, pad, pad]
    assert made.ids[1][:, 1].tolist() == [111, 114, hole, hole, 113, pad, pad, pad]
    assert made.holes is not None
    assert made.holes.flatten().tolist() == [False, False, True, True, *[False] * 4]
    assert made.captured is not None
    assert made.captured.flatten().tolist() == [True, True, False, False, True, *[False] * 3]
    assert made.counts == (3, 2, 3)
    assert made.ids[0].dtype == torch.uint8


def test_a_piece_that_starts_later_leaves_holes_before() -> None:
    layout = TokenLayout.packed([5])
    piece = Routes(torch.tensor([[[1]], [[2]]]), 4, start=2)

    made = replayed(
        [piece], [5], layout.rows, 4, 1, torch.device("cpu"), False, np.zeros((1, 0, 1))
    )

    assert made.ids[0].flatten().tolist() == [0, 0, 1, 2, 0]
    assert made.counts == (2, 3, 0)


def test_overlap_is_a_share_of_captured_choices() -> None:
    report = Report()
    ids = torch.tensor([[0, 1], [2, 3], [4, 5]])
    native = torch.tensor([[1, 0], [2, 7], [4, 5]])
    captured = torch.tensor([[True], [True], [False]])

    report.compare(3, ids, native, captured, 2)
    report.compare(3, ids, ids, captured, 2)
    report.compare(1, ids, native, captured, 2)

    assert report.overlap == {1: 3 / 4, 3: 7 / 8}
    report.compare(1, ids, ids, captured, 2)
    assert report.overlap == {1: 7 / 8, 3: 7 / 8}
