"""A trainer's routing replay, written for the `RouterReplay` of Megatron-core 0.19.

Nothing in this file knows replay-patch: with the plugin on, it runs unchanged from 0.12.0 on. It
has the two ways in which trainers hand over routes. One sets the ids of all layers before a step
(`replay_step`). The other knows microbatches only when a router runs, and feeds each from a queue,
with a pre-forward hook (`RouteQueues`); recomputes then take their ids in the order of forwards.

    routes = record(lambda: model(tokens, positions, None, labels=labels))
    loss = replay_step(routes, lambda: model(tokens, positions, None, labels=labels).mean())

For pipelines and several models at once use `recording()` and `replaying()` (docs/schedules.md):
this API goes by the order in which routers were built, and by calls in the order of a schedule.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor


def record(forward: Callable[[], Any]) -> list[Tensor]:
    """The expert ids [tokens, topk] of every router, in one forward without gradient."""
    RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
    try:
        with torch.no_grad():
            forward()
        return [ids.clone() for ids in RouterReplay.get_recorded_data()]
    finally:
        RouterReplay.clear_global_indices()
        RouterReplay.clear_global_router_replay_action()


def replay_step(routes: Sequence[Tensor], loss: Callable[[], Tensor]) -> Tensor:
    """Forward and backward with given experts, one tensor [tokens, topk] for each router."""
    RouterReplay.set_replay_data(list(routes))
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    try:
        value = loss()
        # What activation recompute runs again takes the same ids, oldest first.
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
        value.backward()
        return value.detach()
    finally:
        RouterReplay.clear_global_indices()
        RouterReplay.clear_global_router_replay_action()


class RouteQueues:
    """Routers that take the ids of their next microbatch when they are called.

    Args:
        model: its routers are found by walking it.
        microbatches: for each one tensor [tokens, topk] per router, in the order of the layers.
    """

    def __init__(self, model: torch.nn.Module, microbatches: Iterable[Sequence[Tensor]]) -> None:
        self.routers = [m for m in model.modules() if isinstance(m, TopKRouter)]
        self.queues: dict[TopKRouter, deque[Tensor]] = {r: deque() for r in self.routers}
        for routes in microbatches:
            for router, ids in zip(self.routers, routes, strict=True):
                self.queues[router].append(ids)
        self.hooks: list[Any] = []

    def __enter__(self) -> "RouteQueues":
        self.hooks = [router.register_forward_pre_hook(self._next) for router in self.routers]
        self.act(RouterReplayAction.REPLAY_FORWARD)
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()
        for router in self.routers:
            router.router_replay.clear_indices()
            router.router_replay.clear_router_replay_action()

    def act(self, action: RouterReplayAction) -> None:
        """Before the forwards, and before the backwards of all of them."""
        for router in self.routers:
            router.router_replay.set_router_replay_action(action)

    def _next(self, router: TopKRouter, _: Any) -> None:
        replay = router.router_replay
        if replay.router_replay_action is RouterReplayAction.REPLAY_FORWARD:
            replay.set_target_indices(self.queues[router].popleft())
