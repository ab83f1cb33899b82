"""What stays the release's own."""

import ast
import inspect

import megatron.core.transformer.moe.moe_utils as moe_utils
import megatron.core.transformer.moe.router as router_module
import pytest
from helpers.routers import FORWARD, hidden_states, make_router, some_ids
from megatron.core.transformer.moe.router import Router, TopKRouter

import replay_patch


def test_routing_is_not_replaced_and_signatures_are_kept() -> None:
    assert not hasattr(TopKRouter.routing, "__wrapped__")
    assert router_module.__name__ == TopKRouter.routing.__module__
    for function in (TopKRouter.forward, TopKRouter.__init__, Router.__init__):
        original = inspect.signature(inspect.unwrap(function)).parameters
        added = {"padding_mask"} if function is TopKRouter.forward else set()
        found = inspect.signature(function).parameters
        assert [p for p in found.values() if p.name in original] == [*original.values()]
        assert found.keys() - original.keys() <= added


def test_without_transformer_engine_a_replaying_router_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, megatron_version: str
) -> None:
    """0.13 ... 0.16 read a name that only a successful import of it binds; the bed sets it."""
    name, router = "te_general_gemm", make_router()
    source = ast.walk(ast.parse(inspect.getsource(moe_utils)))
    uses = {type(n.ctx) for n in source if isinstance(n, ast.Name) and n.id == name}
    if uses != {ast.Load}:
        pytest.skip("the routers of this release do without Transformer Engine")
    monkeypatch.delattr(moe_utils, name)
    router.router_replay.set_target_indices(some_ids())
    router.router_replay.set_router_replay_action(FORWARD)

    with pytest.raises(replay_patch.ReplayPatchError, match=f"megatron-core {megatron_version}"):
        router(hidden_states())
