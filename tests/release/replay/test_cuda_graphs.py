"""Replay inside a CUDA graph is refused."""

import inspect
from typing import Any

import pytest
import torch
from helpers.routers import (
    BACKWARD,
    FIELDS,
    FORWARD,
    IMPL,
    LAYERWISE,
    RECORD,
    as_map,
    graphed_router,
    hidden_states,
    make_router,
    some_ids,
)
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.transformer_config import TransformerConfig

from replay_patch import RouteError

SCOPE = next(n for n in ("cuda_graph_modules", "cuda_graph_scope") if n in FIELDS)
PARTIAL = {"cuda_graph_impl": "transformer_engine"} if IMPL else {"external_cuda_graph": True}
FLAGS = [n for n in ("enable_cuda_graph", "external_cuda_graph") if n in FIELDS]
GRAPHS: dict[str, dict[str, Any]] = {name: {name: True} for name in FLAGS} | {
    name: {"cuda_graph_impl": name}
    for name in ("local", "transformer_engine", "full_iteration")
    if IMPL
}
if "CudaGraphScope" not in inspect.getsource(inspect.getmodule(TransformerConfig)):
    # "All other values enable layerwise CUDA graph": a local graph does not look at "attn".
    GRAPHS["layerwise, with a scope that it ignores"] = LAYERWISE | {"cuda_graph_scope": "attn"}


@pytest.mark.parametrize("action", [FORWARD, BACKWARD])
@pytest.mark.parametrize("graph", GRAPHS)
def test_replay_inside_a_cuda_graph_is_refused(graph: str, action: RouterReplayAction) -> None:
    router = graphed_router(**GRAPHS[graph])
    replay, field = router.router_replay, next(iter(GRAPHS[graph]))

    for change in (replay.set_router_replay_action, RouterReplay.set_global_router_replay_action):
        with pytest.raises(RouteError) as error:
            change(action)
        error.match(
            rf"router of layer 3: the router runs inside a CUDA graph \({field}\), which would "
            "replay the expert ids of its capture for ever; expected graphs off, or the MoE router "
            "outside of them"
        )

    assert replay.router_replay_action is None
    replay.set_router_replay_action(RECORD)
    assert torch.equal(router(hidden_states())[1], as_map(replay.get_recorded_indices()))


def test_a_cuda_graph_around_attention_only_does_not_matter() -> None:
    ids = some_ids()
    router = graphed_router(**PARTIAL, **{SCOPE: "attn"})
    router.router_replay.set_target_indices(ids)
    router.router_replay.set_router_replay_action(FORWARD)

    assert torch.equal(as_map(ids), router(hidden_states())[1])


def test_an_action_that_one_router_refuses_is_set_on_none() -> None:
    first = make_router(1)
    second = graphed_router(**next(iter(GRAPHS.values())))

    with pytest.raises(RouteError):
        RouterReplay.set_global_router_replay_action(FORWARD)

    actions = [router.router_replay.router_replay_action for router in (first, second)]
    assert actions == [None, None]
