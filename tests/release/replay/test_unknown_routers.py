"""Routers that cannot be replayed are refused; subclasses around the release's are not."""

import gc
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.routers import (
    FORWARD,
    K,
    OwnForward,
    T,
    as_map,
    assert_refusal,
    hidden_states,
    make_router,
    some_ids,
    state,
)
from megatron.core.transformer.moe.router import Router, TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor

import replay_patch
from replay_patch import RouteError

STATES = {patch.name: patch.state for patch in replay_patch.status().patches}
NATIVE_REPLAY = STATES["native_router_replay"] == "active"
UNSUPPORTED = ["sinkhorn"]
if hasattr(TopKRouter, "quantile_balancing"):
    UNSUPPORTED.append("quantile_balancing")


@pytest.mark.parametrize("action", RouterReplayAction)
@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_a_router_that_selects_in_another_way_is_refused(
    kind: str, action: RouterReplayAction
) -> None:
    router = make_router(moe_router_load_balancing_type=kind).eval()
    replay = router.router_replay
    replay.set_target_indices(some_ids())
    replay.set_router_replay_action(action)
    before = state(replay)

    with pytest.raises(RouteError) as error:
        router(hidden_states())

    assert_refusal(error, kind, "top-k")
    assert before == state(replay)
    replay.clear_router_replay_action()
    assert router(hidden_states())[1].sum(1).tolist() == [K] * T


class NoTopKRouter(Router):
    """A third party's router, from the base class."""

    def routing(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        flat = logits.view(-1, self.config.num_moe_experts)
        ids = flat.topk(self.config.moe_router_topk).indices
        return flat.softmax(-1), torch.zeros_like(flat).scatter(1, ids, 1).bool()

    def forward(self, input: Tensor) -> Any:
        return self.routing(self.gating(input))


class OwnRouting(TopKRouter):
    """Chooses experts without the release's top-k function."""

    def routing(self, logits: Tensor, *args: Any, **kwargs: Any) -> Any:
        return NoTopKRouter.routing(self, logits)


class TwiceRouting(TopKRouter):
    """Chooses twice and takes the second choice."""

    def routing(self, *args: Any, **kwargs: Any) -> Any:
        super().routing(*args, **kwargs)
        return super().routing(*args, **kwargs)


class Scaling(TopKRouter):
    """Does something around the release's forward and routing, as trainers do."""

    def routing(self, logits: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().routing(logits / 2, *args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class Named(TopKRouter):
    """Calls the parent by name."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return TopKRouter.forward(self, *args, **kwargs)


@pytest.mark.parametrize("router_class", [NoTopKRouter, OwnForward])
def test_a_router_class_that_would_ignore_replay_is_refused(router_class: Any) -> None:
    assert make_router(router_class=router_class, enable_routing_replay=False) is not None

    with pytest.raises(RouteError) as error:
        make_router(router_class=router_class)

    error.match(f"{router_class.__name__}.*expected.*TopKRouter")
    gc.collect()
    assert RouterReplay.global_router_replay_instances == []


@pytest.mark.parametrize("action", RouterReplayAction)
@pytest.mark.parametrize("router_class, made", [(OwnRouting, 0), (TwiceRouting, 2)])
def test_a_routing_that_does_not_choose_once_is_refused(
    router_class: Any, made: int, action: RouterReplayAction
) -> None:
    router = make_router(router_class=router_class)
    replay = router.router_replay
    replay.set_target_indices(some_ids())
    replay.set_target_indices(some_ids())
    replay.set_router_replay_action(action)
    before = state(replay)

    with pytest.raises(RouteError) as error:
        router(hidden_states())

    assert_refusal(error, f"{made} .*{router_class.__name__}", "exactly one")
    assert before == state(replay)


@pytest.mark.parametrize("router_class", [Scaling, Named])
def test_a_subclass_around_the_release_replays(router_class: Any) -> None:
    router = make_router(router_class=router_class)
    ids = some_ids()
    router.router_replay.set_target_indices(ids)
    router.router_replay.set_router_replay_action(FORWARD)

    assert torch.equal(as_map(ids), router(hidden_states())[1])


class Bypassing(TopKRouter):
    """Uses `super()`, but not for its forward."""

    def forward(self, input: Tensor) -> Any:
        return self.routing(super().gating(input))


def bound_forward(router: Any) -> Callable[[Tensor], Any]:
    router.forward = types.MethodType(lambda self, x: self.routing(self.gating(x)), router)
    return router


def parts(router: Any) -> Callable[[Tensor], Any]:
    return lambda hidden: router.routing(router.gating(hidden))


def test_a_forward_that_only_looks_like_the_release_is_refused() -> None:
    with pytest.raises(RouteError, match=r"its forward to call TopKRouter\.forward"):
        make_router(router_class=Bypassing)


@pytest.mark.parametrize("way", [bound_forward, parts])
def test_a_router_that_is_run_without_its_forward_replays_or_is_refused(way: Any) -> None:
    router, ids = make_router(), some_ids()
    run = way(router)
    router.router_replay.set_target_indices(ids)
    router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)

    if NATIVE_REPLAY:  # the release itself hands the replay object to its top-k function
        assert torch.equal(run(hidden_states())[1], as_map(ids))
    else:
        with pytest.raises(RouteError, match=r"outside of TopKRouter\.forward"):
            run(hidden_states())


def test_looking_at_the_logits_of_a_replaying_router_is_allowed() -> None:
    router, other, ids = make_router(), make_router(), some_ids()
    router.router_replay.set_target_indices(ids)
    router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)

    router.gating(hidden_states())

    assert other(hidden_states())[1].sum() == T * K
    assert torch.equal(router(hidden_states())[1], as_map(ids))
