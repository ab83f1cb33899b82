"""Which forward a recompute belongs to, in any order and whatever the model returns.

In one process.
"""

import dataclasses
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import sessions
from helpers.one_process import (
    FULL,
    alone,
    build,
    given_map,
    layout,
    logits_of,
    replayed,
    whole_routes,
)
from helpers.schedules import LAYERS, LENGTH, WIDTH
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from replay_patch import RouteError, recording, replaying
from replay_patch.replay import microbatch_tracker as tracking

# --- wrapped models and their outputs -----------------------------------------------------------


@alone
def test_a_wrapped_model_is_unwrapped() -> None:
    model = build(bf16=True, params_dtype=torch.bfloat16, **FULL)
    config = model.config
    wrapped = DistributedDataParallel(
        config, DistributedDataParallelConfig(), Float16Module(config, model)
    )
    routes = whole_routes()
    noted = sessions.noted(sessions.routers_of([model]))
    with replaying([wrapped]) as replay, noted as calls:
        replay.load(wrapped, routes, layout())
        logits_of(wrapped).float().sum().backward()
        replay.load(model, routes, layout())
        logits_of(model).float().sum().backward()
    assert len(calls) == 4 * LAYERS
    assert replayed(calls, routes)


@dataclasses.dataclass
class Output:
    loss: Tensor
    logits: Tensor
    name: str = "of a model"


SHAPES: dict[str, Callable[[Tensor], Any]] = {
    "loss": lambda logits: logits.float().mean(),
    "tuple": lambda logits: (None, logits),
    "mapping": lambda logits: {"more": [logits], "n": 1},
    "dataclass": lambda logits: Output(logits.mean(), logits),
}


def first_tensor(output: Any) -> Tensor:
    if isinstance(output, Output):
        return output.logits
    if isinstance(output, tuple):
        return output[1]
    return output["more"][0] if isinstance(output, dict) else output


@alone
def test_recomputes_are_told_apart_whatever_the_model_returns() -> None:
    for make in SHAPES.values():
        model = build(**FULL)
        plain = model.forward
        model.forward = lambda *args, plain=plain, make=make, **kw: make(plain(*args, **kw))
        routers = sessions.routers_of([model])
        with replaying(model) as replay:
            losses = []
            for seed in range(3):
                replay.load(model, whole_routes(seed), layout())
                losses.append(first_tensor(logits_of(model, seed)).sum())
            for seed in (1, 0, 2):
                with sessions.noted(routers) as calls:
                    losses[seed].backward()
                assert len(calls) == LAYERS
                assert replayed(calls, whole_routes(seed))


@alone
def test_an_output_that_cannot_be_followed_is_refused_at_the_forward() -> None:
    class Opaque:
        def __init__(self, logits: Tensor) -> None:
            self.logits = logits

    model = build(**FULL)
    plain = model.forward
    model.forward = lambda *args, **kw: Opaque(plain(*args, **kw))

    def work() -> None:
        with replaying(model) as replay:
            replay.load(model, whole_routes(), layout())
            logits_of(model)

    with pytest.raises(RouteError, match=r"output of microbatch 0 \(Opaque\)"):
        work()


@alone
def test_dividing_the_logits_in_place_loses_no_recompute() -> None:
    model = build(**FULL)
    routers = sessions.routers_of([model])
    with replaying(model) as replay:
        replay.load(model, whole_routes(0), layout())
        logits = logits_of(model)
        logits.div_(0.7)
        replay.load(model, whole_routes(1), layout())
        other = logits_of(model)
        gc.collect()
        with sessions.noted(routers) as calls:
            logits.sum().backward()
        other.sum().backward()
    assert len(calls) == LAYERS
    assert replayed(calls, whole_routes(0))


# --- order --------------------------------------------------------------------------------------


@alone
def test_one_loss_over_two_forwards_and_a_dropped_one() -> None:
    model = build(**FULL)
    with replaying(model) as replay:
        losses = []
        for seed in range(4):
            replay.load(model, whole_routes(seed), layout())
            losses.append(logits_of(model, seed).sum())
        del losses[1]  # a step that is skipped
        with sessions.noted(sessions.routers_of([model])) as calls:
            (losses[0] - losses[1]).backward()  # autograd runs the later one first
            losses[2].backward()
    of = [calls[i * LAYERS :][:LAYERS] for i in range(3)]
    assert [replayed(of[i], whole_routes(seed)) for i, seed in enumerate((2, 0, 3))] == [True] * 3


@alone
def test_a_hole_keeps_its_first_experts_though_the_weights_move() -> None:
    model = build(**FULL)
    captured = torch.arange(LENGTH) % 2 == 0
    routers = sessions.routers_of([model])
    with replaying(model) as replay, sessions.noted(routers) as calls:
        replay.load(model, whole_routes(0, captured=captured), layout())
        loss = logits_of(model).sum()
        for router in routers.values():
            router.weight.data = torch.randn(router.weight.shape)
        loss.backward()
    first = {call.layer: call.map for call in calls[:LAYERS]}
    assert len(calls) == 2 * LAYERS
    assert all(torch.equal(call.map, first[call.layer]) for call in calls[LAYERS:])
    holes = ~captured.repeat_interleave(WIDTH)
    for layer, taken in first.items():
        given = given_map(whole_routes(0), layer)
        assert torch.equal(taken[~holes], given[~holes])
        assert not torch.equal(taken[holes], given[holes])
    assert (replay.report.replayed, replay.report.holes, replay.report.padding) == (
        LAYERS * WIDTH * 4,
        LAYERS * WIDTH * 4,
        0,
    )


@alone
def test_backward_after_the_session_is_refused() -> None:
    for session in (recording, replaying):
        model = build(enable_routing_replay=True, **FULL)
        with session(model) as opened:
            routes = (whole_routes(),) if session is replaying else ()
            opened.load(model, *routes, layout())
            loss = logits_of(model).sum()
        with pytest.raises(RouteError, match="backward after the session ended"):
            loss.backward(retain_graph=True)
        with recording(model) as other:
            other.load(model, layout())
            logits_of(model).sum().backward()
            with pytest.raises(RouteError, match="backward after the session ended"):
                loss.backward()
        del loss
        assert tracking.ended_loads == {}
        logits_of(model).sum().backward()


# --- threads ------------------------------------------------------------------------------------


def in_thread(work: Callable[[], Any]) -> Any:
    out: list[Any] = []

    def run() -> None:
        try:
            out.append(work())
        except Exception as error:
            out.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    [found] = out
    return found


@alone
def test_a_session_works_in_any_thread_and_backward_in_any_other() -> None:
    model = build(**FULL)
    routers = sessions.routers_of([model])

    def work() -> Any:
        with replaying(model) as replay, sessions.noted(routers) as calls:
            replay.load(model, whole_routes(0), layout())
            first = logits_of(model, 0).sum()
            replay.load(model, whole_routes(1), layout())
            second = logits_of(model, 1).sum()
            del calls[:]
            assert in_thread(first.backward) is None
            second.backward()
        return calls

    calls = in_thread(work)
    assert replayed(calls[:LAYERS], whole_routes(0))
    assert replayed(calls[LAYERS:], whole_routes(1))


@alone
def test_a_session_belongs_to_one_thread() -> None:
    model = build()
    with recording(model) as record:
        record.load(model, layout())
        error = in_thread(lambda: record.load(model, layout()))
        assert "another thread" in str(error)
        error = in_thread(lambda: logits_of(model))
        assert "another thread" in str(error)
        logits_of(model)
