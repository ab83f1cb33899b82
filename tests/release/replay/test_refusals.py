"""Targets, actions and data that cannot be right are refused and change nothing.

Every refusal names the release.
"""

import enum
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.routers import (
    BACKWARD,
    FORWARD,
    LAYERWISE,
    RECORD,
    E,
    K,
    OwnForward,
    T,
    assert_native_again,
    assert_refusal,
    graphed_router,
    hidden_states,
    make_router,
    some_ids,
    state,
)
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

from replay_patch import RouteError

BAD_WHEN_SET: dict[str, tuple[Any, str, str]] = {
    "float": (torch.zeros(T, K), "float32", "integer"),
    "half": (torch.zeros(T, K, dtype=torch.bfloat16), "bfloat16", "integer"),
    "bool": (torch.zeros(T, K, dtype=torch.bool), "bool", "integer"),
    "complex": (torch.zeros(T, K, dtype=torch.complex64), "complex64", "integer"),
    "list": ([[0, 1]] * T, "list", "Tensor"),
    "None": (None, "NoneType", "Tensor"),
    "one axis": (torch.zeros(T * K, dtype=torch.int64), rf"\({T * K},\)", "topk"),
    "three axes": (torch.zeros(T, 1, K, dtype=torch.int64), rf"\({T}, 1, {K}\)", "topk"),
    "more experts": (torch.arange(K + 1).repeat(T, 1), str(K + 1), f"topk={K}"),
    "fewer experts": (torch.zeros(T, K - 1, dtype=torch.int64), str(K - 1), f"topk={K}"),
    "no expert": (torch.zeros(T, 0, dtype=torch.int64), "0", f"topk={K}"),
    "negative": (torch.tensor([[0, -1]] * T), r"\[0, -1\]", rf"0\.\.{E - 1}"),
    "a hole": (
        torch.tensor([[0, 1]] * (T - 1) + [[-1, -1]]),
        r"row 5 .*\[-1, -1\]",
        rf"0\.\.{E - 1}",
    ),
    "too large": (torch.tensor([[0, E]] * T), rf"\[0, {E}\]", rf"0\.\.{E - 1}"),
    "too large for int64": (
        torch.full((T, K), 2**31, dtype=torch.int64),
        str(2**31),
        rf"0\.\.{E - 1}",
    ),
    "a byte that is no id": (torch.full((T, K), 255, dtype=torch.uint8), "255", rf"0\.\.{E - 1}"),
}
BAD_WHEN_RUN: dict[str, tuple[Any, str, str]] = {
    "more rows": (torch.tensor([[0, 1]] * (T + 1)), str(T + 1), str(T)),
    "fewer rows": (torch.tensor([[0, 1]] * (T - 1)), str(T - 1), str(T)),
    "no rows": (torch.zeros(0, K, dtype=torch.int64), "0", str(T)),
    "one row": (torch.tensor([[0, 1]]), "1", str(T)),
}


@pytest.mark.parametrize("bad", BAD_WHEN_SET)
def test_a_target_that_cannot_be_right_is_refused_when_set(bad: str) -> None:
    ids, found, expected = BAD_WHEN_SET[bad]
    router = make_router()
    replay = router.router_replay
    replay.set_target_indices(some_ids())
    before = state(replay)

    with pytest.raises(RouteError) as error:
        replay.set_target_indices(ids)

    assert_refusal(error, found, expected)
    assert before == state(replay)
    assert_native_again(router)


@pytest.mark.parametrize("action", [FORWARD, BACKWARD])
@pytest.mark.parametrize("bad", BAD_WHEN_RUN | BAD_WHEN_SET)
def test_a_target_that_does_not_fit_is_refused_when_run(
    bad: str, action: RouterReplayAction
) -> None:
    """Also one that did not come through set_target_indices()."""
    ids, found, expected = (BAD_WHEN_RUN | BAD_WHEN_SET)[bad]
    if bad == "None" and action is FORWARD:
        found, expected = "no target", "set_target_indices"
    router = make_router()
    replay = router.router_replay
    replay.set_router_replay_action(RECORD)
    router(hidden_states())
    replay.target_topk_idx, replay.replay_backward_list = ids, [ids]
    replay.set_router_replay_action(action)
    before = state(replay)

    with pytest.raises(RouteError) as error:
        router(hidden_states())

    assert_refusal(error, found, expected)
    assert before == state(replay)
    assert action is replay.router_replay_action
    assert_native_again(router)


@pytest.mark.parametrize("action", [FORWARD, BACKWARD])
def test_replay_without_a_target_is_refused(action: RouterReplayAction) -> None:
    router = make_router()
    router.router_replay.set_router_replay_action(action)

    with pytest.raises(RouteError) as error:
        router(hidden_states())

    assert_refusal(error, f"{action.value}.*no target", "set_target_indices")
    assert_native_again(router)


def test_one_recompute_too_many_is_refused() -> None:
    router = make_router()
    router.router_replay.set_target_indices(some_ids())
    router.router_replay.set_router_replay_action(BACKWARD)
    router(hidden_states())

    with pytest.raises(RouteError) as error:
        router(hidden_states())

    assert_refusal(error, "replay_backward", "set_target_indices")


class Other(enum.Enum):
    REPLAY = "replay"


@pytest.mark.parametrize(
    "action", ["replay_forward", "record", 1, True, Other.REPLAY, RouterReplayAction]
)
def test_what_is_no_action_is_refused(action: Any) -> None:
    router = make_router()
    replay = router.router_replay
    replay.set_target_indices(some_ids())

    for change in (replay.set_router_replay_action, RouterReplay.set_global_router_replay_action):
        with pytest.raises(RouteError) as error:
            change(action)
        assert_refusal(error, "action", "RouterReplayAction")

    assert replay.router_replay_action is None
    assert_native_again(router)


@pytest.mark.parametrize("action", ["replay_forward", 1, Other.REPLAY])
def test_what_is_no_action_is_refused_when_run(action: Any) -> None:
    """Trainers set the attribute, too."""
    router = make_router()
    router.router_replay.set_target_indices(some_ids())
    router.router_replay.router_replay_action = action

    with pytest.raises(RouteError) as error:
        router(hidden_states())

    assert_refusal(error, "action", "RouterReplayAction")
    assert_native_again(router)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_data_for_another_number_of_routers_changes_nothing(count: int) -> None:
    routers = [make_router(number) for number in (4, 7)]
    before = [state(router.router_replay) for router in routers]

    with pytest.raises(RouteError) as error:
        RouterReplay.set_replay_data([some_ids()] * count)

    error.match(f"{count} tensors.*2 routers.*layer 4, layer 7")
    assert before == [state(router.router_replay) for router in routers]


def test_a_mismatch_names_the_routers_that_were_built_twice() -> None:
    twice = [make_router(1), make_router(2), make_router(1)]

    with pytest.raises(RouteError, match=r"twice.*: layer 1\b"):
        RouterReplay.set_replay_data([some_ids()] * 2)
    assert len(twice) == 3


def test_data_with_one_bad_tensor_changes_no_router() -> None:
    routers = [make_router(number) for number in (2, 3)]
    before = [state(router.router_replay) for router in routers]

    with pytest.raises(RouteError) as error:
        RouterReplay.set_replay_data([some_ids(), torch.full((T, K), E)])

    assert_refusal(error, str(E), f"0..{E - 1}")
    assert before == [state(router.router_replay) for router in routers]


def run_with(action: RouterReplayAction, **changes: Any) -> Callable[[Any], Any]:
    """Put attributes on the replay object and run the router."""

    def call(router: Any) -> None:
        for name, value in (changes | {"router_replay_action": action}).items():
            setattr(router.router_replay, name, value)
        router(hidden_states())

    return call


REFUSALS: dict[str, Callable[[Any], Any]] = {
    "wrong dtype": lambda r: r.router_replay.set_target_indices(torch.zeros(T, K)),
    "wrong K": lambda r: r.router_replay.set_target_indices(some_ids(topk=K + 1)),
    "out of range": lambda r: r.router_replay.set_target_indices(some_ids() + E),
    "wrong rows": run_with(FORWARD, target_topk_idx=some_ids(T + 1)),
    "no target": run_with(FORWARD),
    "no target left": run_with(BACKWARD),
    "no action": lambda r: r.router_replay.set_router_replay_action("record"),
    "small buffer": run_with(RECORD, static_buffer=torch.zeros(1, K, dtype=torch.int64)),
    "buffers": lambda r: RouterReplay.set_global_static_buffers(torch.zeros(T, 5, K)),
    "number of tensors": lambda r: RouterReplay.set_replay_data([]),
    "one bad tensor": lambda r: RouterReplay.set_replay_data([None]),
    "no native selection": lambda r: r.router_replay.get_replay_topk(torch.rand(T, E), K),
    "graph": lambda r: graphed_router(**LAYERWISE).router_replay.set_router_replay_action(FORWARD),
    "sinkhorn": lambda r: run_with(RECORD)(make_router(moe_router_load_balancing_type="sinkhorn")),
    "class": lambda r: make_router(router_class=OwnForward),
}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_refusal_names_the_release(refusal: str, megatron_version: str) -> None:
    router = make_router()

    with pytest.raises(RouteError, match=f"megatron-core {megatron_version}"):
        REFUSALS[refusal](router)
