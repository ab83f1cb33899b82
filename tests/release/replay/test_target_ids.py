"""Targets in every form that callers have, and the order in which they are used up."""

from collections.abc import Callable

import pytest
import torch
from helpers.routers import (
    BACKWARD,
    FORWARD,
    RECORD,
    E,
    K,
    T,
    as_map,
    assert_native_again,
    hidden_states,
    make_router,
    some_ids,
    top,
)
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor

from replay_patch import RouteError

DTYPES = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
DTYPES += [getattr(torch, name) for name in ("uint16", "uint32", "uint64") if hasattr(torch, name)]


@pytest.mark.parametrize("action", [FORWARD, BACKWARD])
@pytest.mark.parametrize("dtype", DTYPES)
def test_targets_of_every_integer_type(dtype: torch.dtype, action: RouterReplayAction) -> None:
    router = make_router()
    replay, ids = router.router_replay, some_ids()
    replay.set_target_indices(ids)
    replay.set_router_replay_action(FORWARD)
    expected = router(hidden_states())
    replay.clear_indices()

    replay.set_target_indices(ids.to(dtype))
    replay.set_router_replay_action(action)
    probs, routing_map = router(hidden_states())

    assert torch.equal(expected[0], probs)
    assert torch.equal(as_map(ids), routing_map)


def test_targets_may_be_a_view_of_all_layers() -> None:
    routers = [make_router(number) for number in (1, 2)]
    ids = torch.stack([some_ids(), some_ids()], dim=1).to(torch.uint8)  # [T, layers, K]
    kept = ids.clone()

    RouterReplay.set_replay_data(list(ids.unbind(1)))
    RouterReplay.set_global_router_replay_action(FORWARD)

    for i, router in enumerate(routers):
        assert torch.equal(as_map(ids[:, i]), router(hidden_states())[1])
    assert torch.equal(kept, ids)


@pytest.mark.parametrize("action", [FORWARD, BACKWARD])
def test_a_call_without_tokens_replays(action: RouterReplayAction) -> None:
    """Whole routers of 0.13 and later cannot run without tokens; their top-k function can."""
    replay = make_router().router_replay
    replay.set_target_indices(torch.zeros(0, K, dtype=torch.uint8))
    replay.set_router_replay_action(action)

    values, ids = replay.get_replay_topk(torch.rand(0, E), K, None, None, top)

    assert [tuple(values.shape), tuple(ids.shape)] == [(0, K)] * 2


def fill_by_numpy(target: Tensor, ids: Tensor) -> None:
    target.numpy()[:] = ids.numpy()


def fill_by_data(target: Tensor, ids: Tensor) -> None:
    target.data.copy_(ids)


def fill_in_place(target: Tensor, ids: Tensor) -> None:
    target.copy_(ids)


FILLS = [fill_in_place, fill_by_data, fill_by_numpy]  # torch counts the writes of the first only


@pytest.mark.parametrize("fill", FILLS)
def test_a_buffer_that_is_filled_again_is_checked_again(fill: Callable[..., None]) -> None:
    router, buffer = make_router(), some_ids()
    replay = router.router_replay
    replay.set_target_indices(buffer)
    replay.set_router_replay_action(FORWARD)
    router(hidden_states())

    fill(buffer, torch.full((T, K), E))

    with pytest.raises(RouteError, match=rf"\[{E}, {E}\]"):
        replay.set_target_indices(buffer)


@pytest.mark.parametrize("fill", FILLS)
def test_a_buffer_that_is_filled_again_has_its_own_native_rows(fill: Callable[..., None]) -> None:
    router, buffer = make_router(), some_ids()
    replay = router.router_replay
    native = router(hidden_states())[1]
    replay.set_target_indices(buffer)
    replay.set_router_replay_action(FORWARD)
    router(hidden_states())

    fill(buffer, torch.zeros(T, K, dtype=torch.int64))
    replay.clear_indices()
    replay.set_target_indices(buffer)

    assert torch.equal(native, router(hidden_states())[1])


def test_ids_recorded_in_inference_mode_replay_in_training() -> None:
    router = make_router()
    replay = router.router_replay
    replay.set_router_replay_action(RECORD)
    with torch.inference_mode():
        recorded = router(hidden_states())[1]
    replay.set_target_indices(replay.get_recorded_indices())
    replay.set_router_replay_action(FORWARD)

    probs, routing_map = router(hidden_states())
    probs.square().sum().backward()

    assert torch.equal(recorded, routing_map)
    assert bool(router.weight.grad.any())


def test_backward_takes_the_targets_in_the_order_they_were_set() -> None:
    router = make_router()
    replay, queue = router.router_replay, [some_ids() for _ in range(3)]
    for ids in queue:
        replay.set_target_indices(ids)
        assert replay.target_topk_idx is ids
    assert list(map(id, queue)) == list(map(id, replay.replay_backward_list))

    replay.set_router_replay_action(FORWARD)
    last = [router(hidden_states())[1] for _ in range(2)]
    replay.set_router_replay_action(BACKWARD)
    maps = [router(hidden_states())[1] for _ in range(3)]

    assert all(torch.equal(as_map(queue[-1]), routing_map) for routing_map in last)
    assert all(torch.equal(as_map(i), m) for i, m in zip(queue, maps, strict=True))
    assert replay.replay_backward_list == []


def test_clearing_forgets_everything() -> None:
    router = make_router()
    replay = router.router_replay
    replay.set_router_replay_action(RECORD)
    router(hidden_states())
    replay.set_target_indices(some_ids())

    RouterReplay.clear_global_indices()
    RouterReplay.clear_global_router_replay_action()

    assert (
        replay.recorded_topk_idx,
        replay.target_topk_idx,
        replay.replay_backward_list,
    ) == (None, None, [])
    assert_native_again(router)
