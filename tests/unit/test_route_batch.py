"""Several trajectories together."""

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
