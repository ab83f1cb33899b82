"""Only the final selection is replayed: groups, capacity and losses call top-k as well."""

from typing import Any
from unittest import mock

import megatron.core.transformer.moe.router as router_module
import pytest
import torch
from helpers.exactness import (
    CASES,
    GLOBAL_AUX_LOSS,
    B,
    E,
    K,
    S,
    T,
    act,
    make_input,
    make_router,
    some_ids,
)
from helpers.routers import BACKWARD, FORWARD, RECORD
from torch import Tensor


@pytest.mark.parametrize("case", [c for c in CASES if "groups" in c and "padding" not in c])
def test_one_router_call_takes_one_route(case: str) -> None:
    """Groups, capacity and aux losses call top-k as well."""
    router = make_router(case)
    replay, given_ = router.router_replay, make_input(router)
    queue = [some_ids(router.topk) for _ in range(3)]
    for ids in queue:
        replay.set_target_indices(ids)

    kept = []
    for left in (2, 1, 0):
        kept.append(act(router, BACKWARD, *given_)["map"])
        assert left == len(replay.replay_backward_list)
    act(router, RECORD, *given_)

    for ids, routing_map in zip(queue, kept, strict=True):
        wanted = torch.zeros(T, E, dtype=torch.bool).scatter(1, ids, True)
        dropped = "moe_expert_capacity_factor" in CASES[case]
        assert bool((routing_map <= wanted).all()) if dropped else torch.equal(wanted, routing_map)
    assert (T, router.topk) == tuple(replay.get_recorded_indices().shape)


def own_map_for_losses(router: Any) -> bool:
    """Whether aux losses are computed from a top-k of their own (0.13 on)."""
    method = getattr(router, "compute_routing_scores_for_aux_loss", None)
    return method is None or isinstance(method(torch.zeros(T, E)), tuple)


@pytest.mark.parametrize(
    "kind", ["aux_loss", "seq_aux_loss"] + ["global_aux_loss"] * GLOBAL_AUX_LOSS
)
@pytest.mark.parametrize("case", ["softmax", "sigmoid"])
def test_aux_losses_use_the_map_that_the_release_uses(case: str, kind: str) -> None:
    """0.12: the map in use, so the replayed one. 0.13 on: the native one."""
    router = make_router(case)
    router.config.moe_aux_loss_coeff, router.routing_type = 0.1, kind
    if kind == "global_aux_loss":
        router.global_tokens_per_expert, router.ga_steps = torch.zeros(E), torch.zeros(())
    replay, (hidden, _), ids = router.router_replay, make_input(router), some_ids(K)
    replay.set_target_indices(ids)
    replay.set_router_replay_action(FORWARD)
    losses: list[Tensor] = []
    scaler = router_module.MoEAuxLossAutoScaler

    def attach(output: Tensor, aux_loss: Tensor) -> Tensor:
        losses.append(aux_loss.detach())
        return scaler.apply(output, aux_loss)

    with mock.patch.object(router_module, "MoEAuxLossAutoScaler", mock.Mock(apply=attach)):
        probs, _ = router(hidden)
    (probs * 0).sum().backward()
    actual = losses[0], router.weight.grad.clone()

    router.zero_grad()
    logits = router.gating(hidden).view(T, E)
    dense = logits.softmax(-1) if case == "softmax" else logits.sigmoid()
    dense = dense / dense.sum(-1, keepdim=True)
    used = dense.topk(K).indices if own_map_for_losses(router) else ids
    chosen = torch.zeros(T, E).scatter(1, used, 1.0)
    groups = (S, B) if kind == "seq_aux_loss" else (T, 1)  # tokens per loss, losses
    fraction, share = (x.view(*groups, E).mean(0) for x in (chosen, dense))
    expected = 0.1 * E / K * (fraction * share).sum(-1).mean()
    expected.backward()

    torch.testing.assert_close(actual[0], expected.detach())
    torch.testing.assert_close(actual[1], router.weight.grad)
