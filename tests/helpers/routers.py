"""Routers with replay on, what is fed to them, and what the tests ask of them.

S x B tokens (T), hidden size H, E experts, K top-k. What a release has is asked of its fields and
functions.
"""

import copy
import dataclasses
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplayAction
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from replay_patch.matrix import tiny

RECORD = RouterReplayAction.RECORD
FORWARD = RouterReplayAction.REPLAY_FORWARD
BACKWARD = RouterReplayAction.REPLAY_BACKWARD

S, B, H, E, K = 3, 2, 16, 6, 2
T = S * B
FIELDS = {field.name: field for field in dataclasses.fields(TransformerConfig)}


def make_router(layer_number: int = 3, router_class: Any = None, **options: Any) -> Any:
    """A router with replay on; `options` are config fields."""
    config = make_config(**options)
    if router_class is None:
        return tiny.router(config, layer_number)
    router = router_class(config=config, **tiny.moe_groups(router_class))
    router.set_layer_number(layer_number)
    return router


def make_config(**options: Any) -> Any:
    defaults = {
        "enable_routing_replay": True,
        "num_moe_experts": E,
        "moe_router_topk": K,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }
    return tiny.moe_config(**defaults | options)


def hidden_states(seed: int = 1, rows: int = S) -> Tensor:
    return torch.randn(rows, B, H, generator=torch.Generator().manual_seed(seed))


def some_ids(rows: int = T, experts: int = E, topk: int = K) -> Tensor:
    return torch.rand(rows, experts).argsort(dim=1)[:, :topk].contiguous()


def top(scores: Tensor, topk: int, num_groups: Any = None, group_topk: Any = None) -> Any:
    """A native selection, for calls of get_replay_topk()."""
    return torch.topk(scores, topk, dim=1)


def as_map(ids: Tensor, experts: int = E) -> Tensor:
    return torch.zeros(len(ids), experts, dtype=torch.bool).scatter(1, ids.long(), True)


def state(replay: Any) -> dict[str, Any]:
    """What a caller can see; tensors by identity."""
    return {
        "target": id(replay.target_topk_idx),
        "recorded": id(replay.recorded_topk_idx),
        "queue": [id(ids) for ids in replay.replay_backward_list],
        "native rows": replay.native_rows,
    }


def native_output(router: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Of a router with the same weights in which no replay has ever been on."""
    config = copy.copy(router.config)
    config.enable_routing_replay = config.moe_enable_routing_replay = False
    other = tiny.router(config)
    assert other.router_replay is None
    other.load_state_dict(router.state_dict())
    return other(hidden)


def assert_native_again(router: Any) -> None:
    """Without an action the router routes as if nothing had happened."""
    router.router_replay.clear_router_replay_action()
    hidden = hidden_states(7)
    for expected, actual in zip(native_output(router, hidden), router(hidden), strict=True):
        assert torch.equal(expected, actual)


def assert_refusal(error: Any, found: str, expected: str) -> None:
    """The text names layer, what was found and what was expected (the release: see below)."""
    error.match(rf"layer 3\b.*{found}.*expected.*{expected}")
    assert isinstance(error.value, ValueError)


class OwnForward(TopKRouter):
    """Never reaches TopKRouter.forward."""

    def forward(self, input: Tensor) -> Any:
        return self.routing(self.gating(input))


IMPL = "cuda_graph_impl" in FIELDS  # from 0.15 on; before, one flag for each of its values
LAYERWISE = {"cuda_graph_impl": "local"} if IMPL else {"enable_cuda_graph": True}


def graphed_router(**fields: Any) -> Any:
    config = make_config()
    for name, value in fields.items():
        setattr(config, name, value)
    return tiny.router(config, layer_number=3)


class OneRouter(torch.nn.Module):
    """A model that is one router, in a checkpoint if one is asked for."""

    def __init__(self, router: Any, reentrant: bool | None = None) -> None:
        super().__init__()
        self.router, self.config, self.reentrant = router, router.config, reentrant
        router.set_layer_number(1)
        router.config.num_layers = 1

    def forward(self, hidden: Any) -> Any:
        if self.reentrant is None:
            return self.router(hidden)
        return checkpoint(self.router, hidden, use_reentrant=self.reentrant)
