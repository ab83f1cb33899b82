"""A fused router runs unfused while it records or replays."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import megatron.core.transformer.moe.moe_utils as moe_utils
import megatron.core.transformer.moe.router as router_module
import pytest
import torch
from helpers.routers import (
    BACKWARD,
    FORWARD,
    RECORD,
    B,
    E,
    K,
    OneRouter,
    S,
    as_map,
    assert_native_again,
    hidden_states,
    make_config,
    make_router,
    some_ids,
)
from torch import Tensor

from replay_patch import Routes, TokenLayout, recording, replaying
from replay_patch.matrix import tiny

HAS_FUSION = "fused" in inspect.getsource(router_module.TopKRouter)


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stands for Transformer Engine's kernel: experts 0..K-1. Returns its calls."""
    calls: list[str] = []

    def kernel(logits: Tensor, topk: int, **kwargs: Any) -> tuple[Tensor, Tensor]:
        calls.append("fused")
        routing_map = as_map(torch.arange(topk).repeat(len(logits), 1))
        return routing_map / topk, routing_map

    monkeypatch.setattr(moe_utils, "HAVE_TE", True)
    monkeypatch.setattr(moe_utils, "fused_topk_with_score_function", kernel, raising=False)
    return calls


def test_a_fused_router_runs_unfused_while_it_records_or_replays(
    fused: list[str], warnings: Callable[[], list[str]]
) -> None:
    if not HAS_FUSION:
        pytest.skip("this release has no fused router; see the next test")
    config = make_config()
    config.moe_router_fusion = True
    router, ids = tiny.router(config, layer_number=3), some_ids()
    replay = router.router_replay
    native = native_unfused(router)

    idle = router(hidden_states())[1]
    assert fused == ["fused"]
    replay.set_router_replay_action(RECORD)
    recording = router(hidden_states())
    replay.set_target_indices(ids)
    replay.set_router_replay_action(FORWARD)
    forward = router(hidden_states())[1]
    replay.set_router_replay_action(BACKWARD)
    recompute = router(hidden_states())[1]
    assert fused == ["fused"]
    replay.clear_router_replay_action()
    idle_again = router(hidden_states())[1]

    assert fused == ["fused"] * 2
    assert torch.equal(idle, idle_again)
    assert not torch.equal(native[1], idle)
    assert torch.equal(native[0], recording[0])
    assert torch.equal(native[1], as_map(replay.get_recorded_indices()))
    assert torch.equal(as_map(ids), forward)
    assert torch.equal(as_map(ids), recompute)
    assert len(warnings()) == 1
    assert "layer 3" in warnings()[0]


def test_a_fused_router_in_a_session_runs_unfused(fused: list[str]) -> None:
    if not HAS_FUSION:
        pytest.skip("this release has no fused router")
    config = make_config(enable_routing_replay=False)
    config.moe_router_fusion = True
    chunk = OneRouter(tiny.router(config))
    layout = TokenLayout.padded([S] * B, S)
    routes = [Routes(ids[:, None], E) for ids in some_ids(B * S).view(B, S, K)]

    with recording(chunk) as record:
        record.load(chunk, layout)
        native = chunk(hidden_states())[1]
    with replaying(chunk) as replay:
        replay.load(chunk, routes, layout)
        replayed = chunk(hidden_states())[1]
    assert fused == []
    chunk(hidden_states())

    assert fused == ["fused"]
    for given, taken in ((record.routes(), native), (routes, replayed)):
        ids = torch.stack([one.expert_ids[:, 0] for one in given], dim=1).flatten(0, 1)
        assert torch.equal(as_map(ids), taken)


def native_unfused(router: Any) -> tuple[Tensor, Tensor]:
    config = copy.copy(router.config)
    config.moe_router_fusion = config.enable_routing_replay = False
    other = tiny.router(config)
    other.load_state_dict(router.state_dict())
    return other(hidden_states())


def test_a_release_without_fused_router_takes_the_flag_and_warns_once(
    warnings: Callable[[], list[str]], megatron_version: str
) -> None:
    if HAS_FUSION:
        pytest.skip("this release has a fused router; see the test before")
    routers = [make_router(number, moe_router_fusion=True) for number in (1, 2)]
    ids = some_ids()
    routers[0].router_replay.set_target_indices(ids)
    routers[0].router_replay.set_router_replay_action(FORWARD)

    assert torch.equal(as_map(ids), routers[0](hidden_states())[1])
    assert len(warnings()) == 1
    assert f"megatron-core {megatron_version}" in warnings()[0]
    assert_native_again(routers[0])


def test_the_word_false_is_not_taken_for_a_fused_router() -> None:
    router = make_router(moe_router_fusion="false")

    assert router(hidden_states())[1].any()
    assert router.config.moe_router_fusion is False
