"""Replay is exact in whole MoE layers."""

import pytest
import torch
from helpers.exactness import (
    CASES,
    B,
    E,
    H,
    K,
    S,
    T,
    differing,
    gradients,
    loss,
    rules,
    some_ids,
    weights,
)
from helpers.routers import BACKWARD, FORWARD, RECORD
from megatron.core.transformer.moe.router_replay import RouterReplayAction
from torch import Tensor

from replay_patch.matrix import tiny


@pytest.mark.parametrize(
    "case, dispatcher",
    [
        ("softmax", "alltoall"),
        ("softmax", "allgather"),
        ("sigmoid bias groups scaled", "alltoall"),
        ("sigmoid bias groups scaled", "allgather"),
        ("sigmoid bias groups scaled, all at once", "alltoall"),  # allgather has no capacity
    ],
)
def test_a_layer_with_its_own_ids_is_native_bitwise(case: str, dispatcher: str) -> None:
    options = loss("aux_loss") | {"num_moe_experts": E, "moe_router_topk": K} | CASES[case]
    config = tiny.moe_config(
        enable_routing_replay=True, moe_token_dispatcher_type=dispatcher, **options
    )
    layer = tiny.moe_layer(config)
    replay, hidden = layer.router.router_replay, torch.randn(S, B, H)
    cotangent = torch.randn(S, B, H)

    def step(action: RouterReplayAction | None) -> dict[str, Tensor]:
        layer.zero_grad(set_to_none=True)
        replay.router_replay_action = action
        x = hidden.clone().requires_grad_()
        out = layer(x)[0]
        (out * cotangent).sum().backward()
        return {"out": out.detach(), "input gradient": x.grad} | gradients(layer)

    native, _ = step(None), step(RECORD)
    replay.set_target_indices(replay.get_recorded_indices())

    assert differing(native, step(FORWARD)) == []
    assert differing(native, step(BACKWARD)) == []


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_a_layer_sends_each_token_to_its_replayed_experts(dispatcher: str) -> None:
    config = tiny.moe_config(
        enable_routing_replay=True,
        moe_token_dispatcher_type=dispatcher,
        num_moe_experts=E,
        moe_router_topk=K,
    )
    layer, hidden, ids = tiny.moe_layer(config), torch.randn(S, B, H), some_ids(K)
    layer.router.router_replay.set_target_indices(ids)
    layer.router.router_replay.set_router_replay_action(FORWARD)

    out = layer(hidden)[0].view(T, H)

    flat = hidden.view(T, H)
    chosen = weights(layer.router.gating(hidden).view(T, E), ids, config, rules()[0])
    by_expert = torch.stack(
        [
            config.activation_func(flat @ e.linear_fc1.weight.T) @ e.linear_fc2.weight.T
            for e in layer.experts.local_experts
        ],
        dim=1,
    )  # [T, E, H]
    picked = by_expert.gather(1, ids.unsqueeze(-1).expand(T, K, H))
    torch.testing.assert_close(out, (chosen.unsqueeze(-1) * picked).sum(1))
