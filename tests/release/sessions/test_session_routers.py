"""Routers of every kind in a session: recorded and replayed to the last bit, as without one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import interpreters
from helpers.exactness import (
    B,
    E,
    S,
    differing,
    every_case,
    every_precision,
    make_input,
    make_router,
    run,
    some_ids,
)
from helpers.routers import OneRouter

from replay_patch import RouteError, Routes, TokenLayout, recording, replaying

T = S * B


def layout() -> TokenLayout:
    return TokenLayout.padded([S] * B, S)


def one_per_sequence(ids: Any) -> list[Routes]:
    """Of ids in the order of router rows [S * B, K]."""
    return [Routes(one[:, None], E) for one in ids.view(S, B, -1).unbind(1)]


@every_case
def test_own_routes_are_replayed_bitwise(case: str) -> None:
    router = make_router(case)
    chunk, given = OneRouter(router), make_input(router)
    native = run(router, *given)

    with recording(chunk) as record:
        record.load(chunk, layout())
        recorded = run(router, *given, call=chunk)
    with replaying(chunk) as replay:
        replay.load(chunk, record.routes(), layout())
        replayed = run(router, *given, call=chunk)

    assert differing(native, recorded) == []
    assert differing(native, replayed) == []
    assert replay.report.overlap == {1: 1.0}


@every_precision
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("case", ["softmax", "sigmoid bias groups scaled"])
def test_a_checkpoint_changes_no_bit(case: str, reentrant: bool, precision: str) -> None:
    router = make_router(case, precision)
    given = make_input(router)
    routes = one_per_sequence(some_ids(router.topk))
    results = []
    for chunk in (OneRouter(router), OneRouter(router, reentrant)):
        with replaying(chunk) as replay:
            replay.load(chunk, routes, layout())
            results.append(run(router, *given, call=chunk))

    plain, checkpointed = results
    assert differing(plain, checkpointed) == []
    wanted = torch.zeros(T, E, dtype=torch.bool)
    ids = torch.stack([one.expert_ids[:, 0].long() for one in routes], dim=1).flatten(0, 1)
    assert torch.equal(plain["map"], wanted.scatter(1, ids, True))


def test_a_router_that_does_not_select_by_topk_is_refused_on_entering() -> None:
    router = make_router("softmax")
    router.routing_type = "sinkhorn"

    with pytest.raises(RouteError, match="layer 1: moe_router_load_balancing_type='sinkhorn'"):
        recording(OneRouter(router)).__enter__()


def test_a_router_in_a_cuda_graph_is_refused_on_entering() -> None:
    router = make_router("softmax")
    router.config.enable_cuda_graph = True

    with pytest.raises(RouteError, match="layer 1: the router runs inside a CUDA graph"):
        recording(OneRouter(router)).__enter__()


COMPILED = """
import json
from replay_patch.matrix import cpu, tiny
cpu.install(torch_compile=True)
tiny.init()
import torch
from torch._dynamo.utils import counters
from helpers.routers import OneRouter, as_map, make_config
from replay_patch import Routes, TokenLayout, replaying

S, B, E, K = 4, 2, 6, 2
chunk = OneRouter(tiny.router(make_config()))
whole = chunk.router.forward
chunk.router.forward = torch.compile(lambda hidden: whole(hidden), backend="eager")
right, frames = [], []
for _ in range(12):
    ids = torch.rand(B, S, 1, E).argsort(3)[..., :K]
    with replaying(chunk) as replay:
        layout = TokenLayout.padded([S] * B, S)
        replay.load(chunk, [Routes(one, E) for one in ids], layout)
        probs, routing_map = chunk(torch.randn(S, B, 16))
        probs.sum().backward()
    right.append(torch.equal(routing_map, as_map(ids[:, :, 0].transpose(0, 1).flatten(0, 1), E)))
    frames.append(counters["frames"]["total"])
print(json.dumps([right, frames]))
"""


@pytest.mark.mechanism
def test_a_compiled_router_is_not_compiled_again_for_each_session() -> None:
    helpers = Path(__file__).parents[2]

    right, frames = interpreters.run(COMPILED, path=helpers, REPLAY_PATCH="1")

    assert all(right)
    assert frames[3:] == frames[3:4] * 9
