"""A router's own ids give the native result to the last bit."""

import pytest
import torch
from helpers.exactness import (
    T,
    act,
    determinism,
    differing,
    every_case,
    every_precision,
    every_routing,
    make_input,
    make_router,
    same_bits,
)
from helpers.routers import BACKWARD, FORWARD, RECORD


@pytest.mark.parametrize("deterministic", [False, True])
@every_precision
@every_case
def test_own_ids_give_the_native_result_bitwise(
    case: str, precision: str, deterministic: bool
) -> None:
    router = make_router(case, precision)
    replay, given_ = router.router_replay, make_input(router)

    with determinism(deterministic):
        native = act(router, None, *given_)
        recording = act(router, RECORD, *given_)
        ids = replay.get_recorded_indices()
        replay.set_target_indices(ids)
        forward, recompute = act(router, FORWARD, *given_), act(router, BACKWARD, *given_)
        after = act(router, None, *given_)

    assert (T, router.topk) == tuple(ids.shape)
    for what in (recording, forward, recompute, after):
        assert differing(native, what) == []
    assert replay.replay_backward_list == []


@pytest.mark.parametrize("training", [False, True])
@every_precision
@every_case
def test_own_ids_give_the_native_output_without_gradients(
    case: str, precision: str, training: bool
) -> None:
    router = make_router(case, precision, seed=1).train(training)
    replay, (hidden, _) = router.router_replay, make_input(router)

    with torch.no_grad():
        native = router(hidden)
        replay.set_router_replay_action(RECORD)
        recording = router(hidden)
        replay.set_target_indices(replay.get_recorded_indices())
        replay.set_router_replay_action(FORWARD)
        forward = router(hidden)

    for probs, routing_map in (recording, forward):
        assert same_bits(native[0], probs)
        assert same_bits(native[1], routing_map)


@every_routing
def test_ids_recorded_without_gradients_replay_in_training(case: str) -> None:
    """From 0.18 on the top-k is unsorted without gradients: other columns, same experts.

    So more than two weights are summed in another order, as in the release's own replay.
    """
    router = make_router(case)
    replay, given_ = router.router_replay, make_input(router)
    native = act(router, None, *given_)

    replay.set_router_replay_action(RECORD)
    with torch.no_grad():
        router(given_[0])
    ids = replay.get_recorded_indices()
    replay.set_target_indices(ids)
    forward = act(router, FORWARD, *given_)

    assert same_bits(native["map"], forward["map"])
    for name in ("probs", "weight gradient", "input gradient"):
        torch.testing.assert_close(forward[name], native[name], rtol=1e-5, atol=1e-5)
    if router.topk <= 2:  # a sum of two has only one order
        assert differing(native, forward) == []
