"""Rows that repeat an expert cannot be replayed: they route natively."""

from collections.abc import Callable

import pytest
import torch
from helpers.routers import (
    BACKWARD,
    FORWARD,
    E,
    H,
    K,
    T,
    as_map,
    assert_native_again,
    assert_refusal,
    hidden_states,
    make_router,
    some_ids,
    state,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.transformer.moe.router_replay import RouterReplayAction
from torch import Tensor

from replay_patch import RouteError


def with_padding(ids: Tensor) -> Tensor:
    """The last two rows filled with zeros, as callers pad."""
    ids = ids.clone()
    ids[-2:] = 0
    return ids


def test_rows_that_repeat_an_expert_route_natively(warnings: Callable[[], list[str]]) -> None:
    router = make_router()
    replay, ids = router.router_replay, with_padding(some_ids())
    native = router(hidden_states())[1]
    replay.set_target_indices(ids)
    replay.set_router_replay_action(FORWARD)

    maps = [router(hidden_states())[1] for _ in range(2)]

    for routing_map in maps:
        assert torch.equal(as_map(ids)[:-2], routing_map[:-2])
        assert torch.equal(native[-2:], routing_map[-2:])
        assert routing_map.sum(1).tolist() == [K] * T
    assert replay.native_rows == 4
    assert len(warnings()) == 1
    assert "layer 3: 2 of 6 rows" in warnings()[0]


def test_a_row_that_repeats_one_of_three_experts_routes_natively() -> None:
    router = make_router(moe_router_topk=3)
    native = router(hidden_states())[1]
    router.router_replay.set_target_indices(torch.tensor([[4, 1, 4]] * T))
    router.router_replay.set_router_replay_action(FORWARD)

    assert torch.equal(native, router(hidden_states())[1])


def test_a_recompute_repeats_the_native_picks_of_the_forward() -> None:
    router = make_router()
    replay, ids = router.router_replay, with_padding(some_ids())
    replay.set_target_indices(ids)
    replay.set_router_replay_action(FORWARD)
    forward = router(hidden_states())[1]
    router.weight.data.neg_()  # natively it would choose others now
    replay.clear_router_replay_action()
    assert not torch.equal(forward[-2:], router(hidden_states())[1][-2:])

    replay.set_router_replay_action(BACKWARD)
    recompute = router(hidden_states())[1]

    assert torch.equal(forward, recompute)
    assert torch.equal(with_padding(ids), ids)  # the caller's tensor is not written


@pytest.mark.parametrize(
    "dtype, experts", [(torch.uint8, 300), (torch.int8, 200), (torch.int64, 300)]
)
def test_native_picks_survive_a_narrow_target(dtype: torch.dtype, experts: int) -> None:
    """A zero-filled row natively takes experts whose ids the target's dtype cannot hold."""
    router = make_router(num_moe_experts=experts)
    replay = router.router_replay
    router.weight.data[:-4] = 0
    router.weight.data[-4:] = torch.randn(4, H)
    replay.set_target_indices(torch.zeros(T, K, dtype=dtype))
    replay.set_router_replay_action(FORWARD)
    forward = router(hidden_states())[1]
    assert bool(forward[:, -4:].any())

    replay.set_router_replay_action(BACKWARD)

    assert torch.equal(forward, router(hidden_states())[1])


def test_one_target_for_two_microbatches_freezes_each_of_them() -> None:
    """A trainer may hand over one zero-filled tensor for all of its padding microbatches."""
    router = make_router()
    replay, empty = router.router_replay, torch.zeros(T, K, dtype=torch.int64)
    forwards = []
    for _ in range(2):
        replay.set_target_indices(empty)
    for microbatch in (1, 2):
        replay.set_router_replay_action(FORWARD)
        forwards.append(router(hidden_states(microbatch))[1])
    assert not torch.equal(*forwards)

    replay.set_router_replay_action(BACKWARD)
    recomputes = [router(hidden_states(microbatch))[1] for microbatch in (1, 2)]

    assert [torch.equal(*pair) for pair in zip(forwards, recomputes, strict=True)] == [True, True]


@given(st.lists(st.booleans(), max_size=6), st.integers(0, 2**31))
@settings(deadline=None, derandomize=True, max_examples=40)
def test_every_schedule_recomputes_what_it_ran(backwards: list[bool], seed: int) -> None:
    """Forwards and backwards of four microbatches in any order that a pipeline may have."""
    torch.manual_seed(seed)
    router, forwards, recomputes = make_router(), [], []
    replay = router.router_replay
    for backward in [*backwards, *[False] * 4, *[True] * 4]:
        if backward and len(recomputes) < len(forwards):
            replay.set_router_replay_action(BACKWARD)
            recomputes.append(router(hidden_states(len(recomputes)))[1])
        elif not backward and len(forwards) < 4:
            replay.set_target_indices(torch.randint(E, (T, K)))  # some rows repeat an expert
            replay.set_router_replay_action(FORWARD)
            forwards.append(router(hidden_states(len(forwards)))[1])

    assert [torch.equal(*pair) for pair in zip(forwards, recomputes, strict=True)] == [True] * 4
    assert replay.replay_backward_list == []


@pytest.mark.usefixtures("strict")
def test_under_strict_a_row_that_repeats_an_expert_is_refused() -> None:
    router = make_router()

    def replay(ids: Tensor) -> None:
        router.router_replay.set_target_indices(ids)
        router.router_replay.set_router_replay_action(FORWARD)
        router(hidden_states())

    with pytest.raises(RouteError) as error:
        replay(with_padding(some_ids()))

    assert_refusal(error, r"row 4 .*\[0, 0\]", "distinct")
    assert_native_again(router)


@pytest.mark.parametrize("action", [FORWARD, BACKWARD])
@pytest.mark.usefixtures("strict")
def test_under_strict_such_a_row_is_refused_when_run(action: RouterReplayAction) -> None:
    router, ids = make_router(), with_padding(some_ids())
    replay = router.router_replay
    replay.target_topk_idx, replay.replay_backward_list = ids, [ids]
    replay.set_router_replay_action(action)
    before = state(replay)

    with pytest.raises(RouteError) as error:
        router(hidden_states())

    assert_refusal(error, r"row 4 .*\[0, 0\]", "distinct")
    assert before == state(replay)
    assert_native_again(router)
