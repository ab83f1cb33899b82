"""Megatron inference, with `moe_enable_routing_replay=True`. A request has `routing_indices`, its
server's response `moe_topk_indices`; both for MoE layers only."""

from replay_patch.routes.responses.engine import Engine

ENGINE = Engine(
    fields=("routing_indices", "moe_topk_indices"),
    layers="moe",
    switch="moe_enable_routing_replay",
)
