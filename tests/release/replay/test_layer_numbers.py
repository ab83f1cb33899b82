"""Replay objects know which router they belong to."""

from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay

from replay_patch import RouteError
from replay_patch.matrix import tiny


@pytest.mark.parametrize("frequency, numbers", [(1, [1, 2, 3]), ([0, 1, 1], [2, 3]), (2, [1, 3])])
def test_routers_of_a_model_know_their_layer(frequency: Any, numbers: list[int]) -> None:
    model = tiny.gpt_model(
        tiny.moe_config(enable_routing_replay=True, num_layers=3, moe_layer_freq=frequency)
    )

    entries = RouterReplay.global_router_replay_instances
    assert numbers == [entry.layer_number for entry in entries]
    assert [0] * len(numbers) == [entry.mtp_depth for entry in entries]
    assert entries == [m.router_replay for m in model.modules() if isinstance(m, TopKRouter)]


def test_routers_of_mtp_blocks_know_their_depth() -> None:
    model = tiny.gpt_model(tiny.moe_config(enable_routing_replay=True, mtp_num_layers=2))

    def keys(module: Any) -> list[tuple[int, int]]:
        replays = [m.router_replay for m in module.modules() if isinstance(m, TopKRouter)]
        return [(r.layer_number, r.mtp_depth) for r in replays]

    assert keys(model.decoder) == [(1, 0), (2, 0)]
    assert [[depth for _, depth in keys(layer)] for layer in model.mtp.layers] == [[1], [2]]
    everything = [
        (r.layer_number, r.mtp_depth) for r in RouterReplay.global_router_replay_instances
    ]
    assert len(set(everything)) == 4


def test_an_error_names_the_mtp_block() -> None:
    model = tiny.gpt_model(tiny.moe_config(enable_routing_replay=True, mtp_num_layers=1))
    replay = next(r for r in RouterReplay.global_router_replay_instances if r.mtp_depth)

    with pytest.raises(RouteError, match="MTP block 1"):
        replay.set_target_indices(torch.zeros(2, 9, dtype=torch.int64))
    assert model is not None
