"""Replay in a recompute, under both kinds of checkpoint, with several microbatches waiting."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.routers import as_map, hidden_states, make_router, some_ids
from megatron.core.transformer.moe.router_replay import RouterReplayAction
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from replay_patch.matrix import tiny

KINDS = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])


def gradients(router: Any, reentrant: bool | None, targets: list[Tensor]) -> list[Tensor]:
    """Gradient of the router weight, microbatch by microbatch; None: no checkpoint."""
    replay, outs = router.router_replay, []
    replay.clear_indices()
    replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    for seed, target in enumerate(targets):
        replay.set_target_indices(target)
        hidden = hidden_states(seed).requires_grad_()
        run: Callable[..., Tensor] = lambda h: (router(h)[0] ** 2).sum()  # noqa: E731
        plain = reentrant is None
        outs.append(run(hidden) if plain else checkpoint(run, hidden, use_reentrant=reentrant))
    replay.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
    found = []
    for out in outs:
        router.zero_grad()
        out.backward()
        found.append(router.weight.grad.clone())
    return found


@KINDS
def test_each_recompute_takes_the_ids_of_its_own_microbatch(reentrant: bool) -> None:
    router = make_router()
    targets = [some_ids(), some_ids().flip(1).roll(1, 0)]

    expected = gradients(router, None, targets)
    found = gradients(router, reentrant, targets)

    assert [torch.equal(a, b) for a, b in zip(found, expected, strict=True)] == [True, True]
    assert router.router_replay.replay_backward_list == []


def test_the_early_stop_of_a_checkpoint_is_no_failure() -> None:
    """A non-reentrant checkpoint of the router alone leaves it by an exception, on purpose."""
    router = make_router()
    replay, queue = router.router_replay, []
    for seed in (1, 2):
        replay.set_target_indices(some_ids().roll(seed, 0))
        replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        hidden = hidden_states(seed).requires_grad_()
        queue.append(checkpoint(lambda h: router(h)[0], hidden, use_reentrant=False))

    replay.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
    waiting = []
    for out in queue:
        out.sum().backward()
        waiting.append(len(replay.replay_backward_list))

    assert waiting == [1, 0]


@KINDS
def test_rows_that_route_natively_do_so_in_the_recompute(reentrant: bool) -> None:
    router = make_router()
    target = some_ids()
    target[2] = 0

    expected = gradients(router, None, [target])
    found = gradients(router, reentrant, [target])

    assert torch.equal(found[0], expected[0])


def test_a_layer_with_such_rows_can_be_recomputed() -> None:
    layer = tiny.moe_layer(tiny.moe_config(enable_routing_replay=True))
    replay = layer.router.router_replay
    replay.set_target_indices(torch.tensor([[3, 0], [0, 0], [1, 2]]))
    replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    hidden = torch.randn(3, 1, 16, requires_grad=True)
    out = checkpoint(lambda h: layer(h)[0], hidden, use_reentrant=False)

    replay.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
    out.sum().backward()

    assert hidden.grad is not None


def test_the_recompute_belongs_to_the_last_forward_of_its_target() -> None:
    """Log-probs first and training then, on one target with rows that route natively."""
    router = make_router()
    replay, maps = router.router_replay, []
    router.register_forward_hook(lambda module, args, out: maps.append(out[1]))
    target = some_ids()
    target[2] = 0
    replay.set_target_indices(target)
    replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    with torch.no_grad():
        router(hidden_states(1))
    hidden = hidden_states(2).requires_grad_()
    out = checkpoint(lambda h: router(h)[0], hidden, use_reentrant=True)

    replay.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
    out.sum().backward()

    first, training, recompute = maps
    assert torch.equal(training, recompute)
    assert not torch.equal(first[2], training[2])  # the row does route natively
    kept = [row for row in range(len(target)) if row != 2]
    assert torch.equal(training[kept], as_map(target)[kept])
