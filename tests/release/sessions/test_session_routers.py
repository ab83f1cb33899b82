"""Routers of every kind in a session: recorded and replayed to the last bit, as without one."""

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
from programs.sessions import compiled_router

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


@pytest.mark.mechanism
def test_a_compiled_router_is_not_compiled_again_for_each_session() -> None:
    right, frames = interpreters.run(compiled_router.replayed, REPLAY_PATCH="1")

    assert all(right)
    assert frames[3:] == frames[3:4] * 9
