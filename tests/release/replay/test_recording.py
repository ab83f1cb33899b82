"""What RECORD keeps, and the static buffers that it may keep it in."""

import pytest
import torch
from helpers.routers import (
    RECORD,
    B,
    K,
    T,
    as_map,
    assert_native_again,
    hidden_states,
    make_router,
    state,
)
from megatron.core.transformer.moe.router_replay import RouterReplay
from torch import Tensor

from replay_patch import RouteError


def test_a_recording_is_int64_in_native_columns_and_of_the_last_forward() -> None:
    router = make_router()
    replay = router.router_replay
    replay.set_router_replay_action(RECORD)

    router(hidden_states(1))
    probs, routing_map = router(hidden_states(2, rows=2))

    ids = replay.get_recorded_indices()
    assert (torch.int64, (2 * B, K)) == (ids.dtype, tuple(ids.shape))
    assert torch.equal(as_map(ids), routing_map)
    assert torch.equal(probs.gather(1, ids), probs.topk(K).values)
    assert [ids] == RouterReplay.get_recorded_data()


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
def test_static_buffers_expose_no_stale_rows(dtype: torch.dtype) -> None:
    routers = [make_router(number) for number in (1, 2)]
    buffer = torch.full((T + 3, 2, K), -7, dtype=dtype)
    RouterReplay.set_global_static_buffers(buffer)
    RouterReplay.set_global_router_replay_action(RECORD)
    for router in routers:
        router(hidden_states(1))

    maps = [router(hidden_states(2, rows=2))[1] for router in routers]

    recorded = RouterReplay.get_recorded_data()
    for i, (ids, routing_map) in enumerate(zip(recorded, maps, strict=True)):
        assert torch.equal(as_map(ids), routing_map)
        assert tuple(ids.shape) == (2 * B, K)
        assert buffer[:, i].data_ptr() == ids.data_ptr()
    assert bool((buffer[T:] == -7).all())

    RouterReplay.clear_global_static_buffers()
    routers[0](hidden_states(1))
    assert len(routers[0].router_replay.get_recorded_indices()) == T
    assert [router.router_replay.static_buffer for router in routers] == [None, None]


@pytest.mark.parametrize(
    "shape, dtype",
    [
        ((T - 1, K), torch.int64),
        ((T, K + 1), torch.int64),
        ((T, K - 1), torch.int64),
        ((T * K,), torch.int64),
        ((T, K), torch.uint8),  # 300 experts
        ((T, K), torch.float32),
    ],
)
def test_a_static_buffer_that_cannot_hold_the_ids_is_refused(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    router = make_router(num_moe_experts=300)
    replay = router.router_replay
    replay.set_router_replay_action(RECORD)
    router(hidden_states())
    before = state(replay)
    buffer = torch.zeros(shape, dtype=dtype)

    def record_into(buffer: Tensor) -> None:
        replay.set_static_buffer(buffer)
        router(hidden_states())

    with pytest.raises(RouteError) as error:
        record_into(buffer)

    error.match("layer 3.*buffer.*expected")
    assert before == state(replay)
    assert not bool(buffer.any())
    replay.clear_static_buffer()
    assert_native_again(router)


@pytest.mark.parametrize("shape", [(T, 3, K), (T, 1, K), (T, K), (T,)])
def test_static_buffers_for_another_number_of_routers_are_refused(shape: tuple[int, ...]) -> None:
    routers = [make_router(number) for number in (1, 2)]

    with pytest.raises(RouteError, match=r"buffer.*expected.*2 routers"):
        RouterReplay.set_global_static_buffers(torch.zeros(shape, dtype=torch.int64))

    assert [router.router_replay.static_buffer for router in routers] == [None, None]
