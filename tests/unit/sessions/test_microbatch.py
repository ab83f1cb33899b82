"""What a load hands to routers: ids in row order, and experts for rows of padding."""

from types import SimpleNamespace
from typing import Any

import torch

from replay_patch import Routes, TokenLayout
from replay_patch.sessions.microbatch import microbatch_to_replay
from replay_patch.sessions.report import Report


def stage(layers: int, experts: int, topk: int) -> Any:
    config = SimpleNamespace(
        num_moe_experts=experts,
        moe_router_topk=topk,
        num_layers=layers,
        expert_model_parallel_size=1,
        moe_token_dispatcher_type="alltoall",
        sequence_parallel=False,
    )
    numbers = tuple(range(1, layers + 1))
    return SimpleNamespace(config=config, layers=numbers, device=torch.device("cpu"))


def test_ids_come_in_the_order_of_router_rows() -> None:
    layout = TokenLayout.padded([3, 2], 4)
    tokens = torch.arange(10, 15)  # the number of a token, in each layer another column order
    ids = torch.stack([tokens, tokens + 100], dim=1)
    routes = [
        Routes(torch.stack([part, part + 1], dim=2), 200, captured=known)
        for part, known in zip((ids[:3], ids[3:4]), ([True, False, True], [True]), strict=True)
    ]

    made, after = microbatch_to_replay(routes, layout, stage(2, 200, 2), (1, 2), 4, True, True)

    assert made.ids[0][:5, 0].tolist() == [10, 13, 0, 0, 12]
    assert made.ids[1][:5, 1].tolist() == [111, 114, 0, 0, 113]
    assert made.ids[0][5:].tolist() == [[4, 5], [6, 7], [8, 9]]  # padding goes on from there
    assert made.ids[1][5:].tolist() == [[10, 11], [12, 13], [14, 15]]
    assert after == 16
    assert made.holes is not None
    assert made.holes.flatten().tolist() == [False, False, True, True, *[False] * 4]
    assert made.captured is not None
    assert made.captured.flatten().tolist() == [True, True, False, False, True, *[False] * 3]
    assert made.counts == (3, 2, 3)
    assert made.ids[0].dtype == torch.uint8


def test_a_piece_that_starts_later_leaves_holes_before() -> None:
    layout = TokenLayout.packed([5])
    piece = Routes(torch.tensor([[[1]], [[2]]]), 4, start=2)

    made, _ = microbatch_to_replay([piece], layout, stage(1, 4, 1), (1,), 0, False, True)

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
