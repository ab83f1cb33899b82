"""Several trajectories together."""

from typing import Any

import pytest
import torch

from replay_patch import RouteBatch, RouteError, Routes

E = 8


def trajectory(tokens: int, layers: int = 3, num_experts: int = E, topk: int = 2) -> Routes:
    ids = torch.rand(tokens, layers, num_experts).argsort(2)[..., :topk]
    return Routes(ids, num_experts)


def test_it_is_a_list() -> None:
    entries = [trajectory(4), trajectory(0), trajectory(2)]

    batch = RouteBatch(entries)

    assert len(batch) == 3
    assert list(batch) == entries
    assert batch[1] is entries[1]
    assert list(batch[1:]) == entries[1:]
    assert isinstance(batch[1:], RouteBatch)
    assert len(RouteBatch([])) == 0


def test_layers_are_selected_before_anything_is_moved() -> None:
    batch = RouteBatch([trajectory(4), trajectory(2)])

    chosen = batch.for_layers([5], moe_layers=[2, 3, 5])

    for before, after in zip(batch, chosen, strict=True):
        assert torch.equal(before.expert_ids[:, 2:], after.expert_ids)
        assert after.layers == (5,)
        assert after.expert_ids.untyped_storage().nbytes() == before.num_tokens * 2


def test_one_shot_iterables_are_enough() -> None:
    batch = RouteBatch(trajectory(n) for n in (1, 2))

    chosen = batch.for_layers(iter([2]), moe_layers=iter([2, 3, 5]))

    assert [r.layers for r in chosen] == [(2,), (2,)]


def test_an_error_names_the_trajectory() -> None:
    batch = RouteBatch([trajectory(4), trajectory(2, layers=2)])

    with pytest.raises(RouteError, match="trajectory 1: 2 layers of routes"):
        batch.for_layers([5], moe_layers=[2, 3, 5])


def test_a_trajectory_without_routes_is_refused_early() -> None:  # 73
    with pytest.raises(RouteError, match="trajectory 1 is a NoneType"):
        RouteBatch([trajectory(4), None])  # type: ignore[list-item]


@pytest.mark.parametrize("other", [trajectory(1, num_experts=9), trajectory(1, topk=3)])
def test_trajectories_of_another_model_are_refused(other: Routes) -> None:
    with pytest.raises(RouteError, match=r"trajectory 1 has .*expected \(8, 2\)"):
        RouteBatch([trajectory(1), other])


# --- select and split -------------------------------------------------------------------------


def test_it_can_be_reordered_filtered_and_repeated() -> None:
    entries = [trajectory(n) for n in (4, 0, 2)]

    assert list(RouteBatch(entries).select([2, 0, 0])) == [entries[2], entries[0], entries[0]]
    assert len(RouteBatch(entries).select([])) == 0


def test_it_is_split_into_microbatches() -> None:
    entries = [trajectory(n) for n in (4, 0, 2)]

    parts = RouteBatch(entries).split([1, 0, 2])

    assert [list(part) for part in parts] == [entries[:1], [], entries[1:]]
    assert all(isinstance(part, RouteBatch) for part in parts)


@pytest.mark.parametrize(
    "sizes, message",
    [
        ([1, 1], "are 2 trajectories: expected 3"),  # as 5 // 2 microbatches would drop one
        ([2, 2], "are 4 trajectories: expected 3"),
        ([4, -1], r"sizes\[1\] is -1"),
        (3, "sizes=3"),
    ],
)
def test_a_split_that_loses_trajectories_is_refused(sizes: Any, message: str) -> None:  # 57
    with pytest.raises(RouteError, match=message):
        RouteBatch([trajectory(1)] * 3).split(sizes)


# --- the dense tensor that trainers hold ------------------------------------------------------


def dense(lengths: list[int], side: str, size: int = 5) -> tuple[torch.Tensor, list[Routes]]:
    """([B, S, L, K] with 99 as padding, the trajectories in it)."""
    entries = [trajectory(n) for n in lengths]
    ids = torch.full((len(lengths), size, 3, 2), 99, dtype=torch.int64)
    for place, entry in enumerate(entries):
        begin = 0 if side == "right" else size - entry.num_tokens
        ids[place, begin : begin + entry.num_tokens] = entry.expert_ids
    return ids, entries


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", [torch.clone, torch.Tensor.numpy, torch.Tensor.tolist])
def test_from_padded(side: str, kind: Any) -> None:
    ids, entries = dense([3, 0, 5], side)

    batch = RouteBatch.from_padded(kind(ids), [3, 0, 5], E, padding_side=side, layers=[2, 3, 5])

    for made, entry in zip(batch, entries, strict=True):
        assert torch.equal(made.expert_ids, entry.expert_ids)
        assert made.captured.all()
        assert made.layers == (2, 3, 5)


def test_rows_of_minus_one_are_holes() -> None:
    ids, _ = dense([3], "right")
    ids[0, 1, 2, 0] = -1

    assert RouteBatch.from_padded(ids, [3], E)[0].captured.tolist() == [True, False, True]


@pytest.mark.parametrize("side", ["left", "right"])
def test_only_the_captured_prefix_is_read(side: str) -> None:  # 54
    ids, entries = dense([3, 5], side)
    begin = 2 if side == "left" else 0
    ids[0, begin + 2] = 0  # as trainers fill the last token's row
    ids[1, 0, 0, 0] = -1

    batch = RouteBatch.from_padded(
        ids, torch.tensor([3, 5]), E, padding_side=side, captured_lengths=[2, 4]
    )

    assert batch[0].captured.tolist() == [True, True, False]
    assert batch[1].captured.tolist() == [False, True, True, True, False]
    assert torch.equal(batch[0].expert_ids[:2], entries[0].expert_ids[:2])


def test_the_dtype_follows_from_the_model_and_not_from_the_data() -> None:  # 76
    ids = torch.tensor([[[[100, 200]]]])

    assert RouteBatch.from_padded(ids, [1], 512)[0].expert_ids.dtype is torch.int16
    assert RouteBatch.from_padded(ids + 100, [1], 512)[0].expert_ids.tolist() == [[[200, 300]]]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"ids": torch.zeros(2, 5, 3)}, r"shape \[2, 5, 3\]: expected \[batch"),
        ({"ids": [[[[1, 2]]], [[[1]]]]}, "ids is no array"),
        ({"ids": torch.zeros(2, 5, 3, 2)}, "trajectory 0: expert_ids has dtype torch.float32"),
        ({"ids": torch.zeros(2, 5, 3, 2, device="meta", dtype=torch.int64)}, "0: .* is on meta"),
        ({"lengths": [3]}, "lengths are 1, and ids has shape"),
        ({"lengths": [3, 6]}, r"lengths\[1\] is 6: expected at most 5"),
        ({"lengths": [3, -1]}, r"lengths\[1\] is -1"),
        ({"lengths": 3}, "lengths=3"),
        ({"lengths": torch.ones(2, device="meta")}, "lengths is on meta"),
        ({"captured_lengths": [3, 3]}, r"captured_lengths\[1\] is 3: expected at most 2"),
        ({"padding_side": "top"}, "padding_side='top'"),
        ({"num_experts": 2}, r"trajectory \d: expert_ids.*out of range"),
        ({"layers": [1]}, "trajectory 0: layers="),
    ],
)
def test_a_dense_tensor_that_cannot_be_right_is_refused(
    change: dict[str, Any], message: str
) -> None:
    ids, _ = dense([3, 2], "right")
    arguments: dict[str, Any] = {"ids": ids, "lengths": [3, 2], "num_experts": E}

    with pytest.raises(RouteError, match=message):
        RouteBatch.from_padded(**arguments | change)


def test_a_bad_row_may_become_a_hole() -> None:
    ids, _ = dense([3, 2], "right")
    ids[1, 1, 0] = 3  # an expert twice

    batch = RouteBatch.from_padded(ids, [3, 2], E, on_invalid="hole")

    assert [one.captured.tolist() for one in batch] == [[True] * 3, [True, False]]
