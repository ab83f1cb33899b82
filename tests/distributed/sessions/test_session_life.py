"""Entering and leaving: a session leaves nothing, and touches no other model. One process."""

import collections
import contextlib
import copy
import gc
import resource
from typing import Any

import megatron.core
import pytest
import torch
from helpers import schedules, sessions
from helpers.one_process import FULL, alone, build, layout, logits_of, replayed, whole_routes
from helpers.schedules import LAYERS, LENGTH, MICROBATCHES, ONE_PROCESS, WIDTH
from helpers.sessions import K
from megatron.core.transformer.moe.router_replay import RouterReplayAction
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from replay_patch import RouteError, recording, replaying
from replay_patch.matrix import tiny
from replay_patch.matrix.environments import NEWEST
from replay_patch.matrix.ranks import launch
from replay_patch.replay import microbatch_tracker as tracking
from replay_patch.sessions.microbatch import Microbatch
from replay_patch.sessions.session_replay import SessionReplay


def left_behind() -> list[Any]:
    gc.collect()
    kinds = (Microbatch, tracking.Load, SessionReplay, tracking.Tracker)
    return [type(o).__name__ for o in gc.get_objects() if isinstance(o, kinds)]


# --- nothing is left ----------------------------------------------------------------------------


@alone
def test_after_a_schedule_all_is_as_before() -> None:
    for flag in (False, True):
        model = build(enable_routing_replay=flag, **FULL)
        before = {n: r.router_replay for n, r in sessions.routers_of([model]).items()}
        hooks = len(model._forward_hooks), len(model._forward_pre_hooks)

        outcome = sessions.run(ONE_PROCESS, [model], [NO_TRUTH], forward_only=False)

        assert outcome.losses
        for number, router in sessions.routers_of([model]).items():
            assert router.router_replay is before[number]
            assert ("router_replay" in vars(router)) or before[number] is None
        assert (len(model._forward_hooks), len(model._forward_pre_hooks)) == hooks
        assert left_behind() == []
        assert tracking.ended_loads == {}


NO_TRUTH = sessions.Truth(
    torch.zeros(LAYERS, MICROBATCHES, LENGTH * WIDTH, 16), torch.zeros(0), [], {}
)


@alone
def test_forward_only_replay_keeps_one_microbatch_at_most() -> None:
    model = build(**FULL)
    alive: list[int] = []

    with torch.no_grad(), replaying(model) as replay:
        for seed in range(4):
            replay.load(model, whole_routes(seed), layout())
            alive.append(left_behind().count("Microbatch"))
            logits_of(model, seed)
            alive.append(left_behind().count("Microbatch"))

    assert alive == [1, 0] * 4


@alone
def test_training_keeps_the_microbatches_in_flight() -> None:
    model = build(**FULL)
    alive: list[int] = []

    with replaying(model) as replay:
        outputs = []
        for seed in range(3):
            replay.load(model, whole_routes(seed), layout())
            outputs.append(logits_of(model, seed))
            alive.append(left_behind().count("Microbatch"))
        for output in outputs:
            output.sum().backward()
        del output, outputs
        alive.append(left_behind().count("Microbatch"))

    assert alive == [1, 2, 3, 0]


@alone
def test_what_is_held_is_compact() -> None:
    model = build()
    with replaying(model) as replay:
        replay.load(model, whole_routes(), layout())
        [held] = [o for o in gc.get_objects() if isinstance(o, Microbatch)]
        assert [ids.dtype for ids in held.ids] == [torch.uint8] * LAYERS
        assert held.ids[0].untyped_storage().nbytes() == LAYERS * LENGTH * WIDTH * K
        logits_of(model)


def rounds_leave_nothing(rounds: int) -> None:
    """Each is a schedule that replays and one that records; every tenth fails half-way."""
    model = build(**FULL)
    counts = []
    for number in range(rounds):
        model.zero_grad()
        with replaying(model) as replay:
            replay.load(model, whole_routes(number), layout())
            logits_of(model).sum().backward()
        with contextlib.suppress(KeyError), recording(model) as record:
            record.load(model, layout())
            out = logits_of(model)
            if number % 10 == 9:
                raise KeyError
            out.sum().backward()
        if number in (rounds // 2 - 1, rounds - 1):
            del replay, record, out
            assert left_behind() == []
            tensors = sum(isinstance(o, Tensor) for o in gc.get_objects())
            counts.append((tensors, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))
    (tensors_then, kib_then), (tensors, kib) = counts
    assert tensors_then == tensors
    assert kib - kib_then < 4096, f"the process has grown by {kib - kib_then} KiB"


@alone
def test_a_backward_that_fails_leaves_the_others_their_recompute() -> None:
    model = build(**FULL)
    with replaying(model) as replay:
        replay.load(model, whole_routes(1), layout())
        first = logits_of(model, 1)
        replay.load(model, whole_routes(2), layout())
        second = logits_of(model, 2)
        hook = model.embedding.word_embeddings.weight.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            first.sum().backward()
        hook.remove()
        second.sum().backward()


@alone
def test_a_copy_of_a_router_is_in_no_session() -> None:
    model = build(enable_routing_replay=True)
    with replaying(model) as replay:
        replay.load(model, whole_routes(), layout())
        inside = sessions.routers_of([model])[1].router_replay
        copied = copy.deepcopy(inside)
        logits_of(model)

    assert not isinstance(copied, SessionReplay)
    copied.set_router_replay_action(RouterReplayAction.RECORD)


@alone
def test_schedules_leave_nothing() -> None:
    rounds_leave_nothing(20)


@pytest.mark.skipif(megatron.core.__version__ != NEWEST, reason="takes a minute: on the newest")
def test_two_thousand_schedules_leave_nothing() -> None:
    launch(thousand_rounds, 1, timeout=600)


def thousand_rounds(rank: int, world: int, init_file: str) -> None:
    tiny.init(world, rank, init_file)
    rounds_leave_nothing(1000)


class Waiting(TorchDispatchMode):
    """Counts the operations that would wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        indexed = name.startswith("index") and any(
            isinstance(i, Tensor) and i.dtype is torch.bool
            for arg in args
            if isinstance(arg, (list, tuple))
            for i in arg
        )
        if indexed or name in (
            "_local_scalar_dense",
            "nonzero",
            "masked_select",
            "is_nonzero",
            "equal",
            "_unique2",
            "unique_dim",
        ):
            self.counts[name] += 1
        return func(*args, **kwargs or {})


@alone
def test_a_schedule_waits_for_no_device() -> None:
    model = build(**FULL)
    given = sessions.batches(0)

    def waiting(session: Any) -> collections.Counter[str]:
        model.zero_grad()
        forward_step = sessions.step(ONE_PROCESS, [model], session, given)
        # With the loads and all else that happens inside of the block.
        with Waiting() as mode:
            schedules.run_schedule([model], given, forward_step_func=forward_step)
        return mode.counts

    native = waiting(sessions.Native())
    with replaying(model) as replay:
        assert waiting(replay) == native
    with recording(model) as record:
        assert waiting(record) == native
    assert replay.report.holes
    assert replay.report.overlap


# --- exceptions ---------------------------------------------------------------------------------


class Oops(Exception):
    pass


@alone
def test_an_exception_anywhere_ends_the_session() -> None:
    model = build(**FULL)
    routers = sessions.routers_of([model])

    def fail(*_: Any) -> None:
        raise Oops

    def in_forward(out: Any) -> None:
        hook = routers[3].register_forward_hook(fail)
        try:
            logits_of(model)
        finally:
            hook.remove()

    def in_recompute(out: Any) -> None:
        hook = routers[2].register_forward_hook(fail)
        try:
            out.sum().backward()
        finally:
            hook.remove()

    def after_it(out: Any) -> None:
        fail()

    for where in (in_forward, in_recompute, after_it):
        with pytest.raises(Oops), replaying(model) as replay:  # noqa: PT012
            replay.load(model, whole_routes(), layout())
            out = None if where is in_forward else logits_of(model)
            where(out)
        out = None
        del replay
        assert left_behind() == []
        assert not any(isinstance(r.router_replay, SessionReplay) for r in routers.values())

    with replaying(model) as replay, sessions.noted(routers) as calls:
        replay.load(model, whole_routes(5), layout())
        logits_of(model, 5).sum().backward()
    assert replayed(calls, whole_routes(5))
    assert len(calls) == 2 * LAYERS


# --- several models -----------------------------------------------------------------------------


@alone
def test_entering_twice_is_refused_and_the_first_goes_on() -> None:
    model = build()
    routes = whole_routes()

    with replaying(model) as replay, sessions.noted(sessions.routers_of([model])) as calls:
        for other in (recording, replaying):
            with pytest.raises(RouteError, match=r"layer 1: the model is in a session already"):
                other(model).__enter__()
        replay.load(model, routes, layout())
        logits_of(model)

    assert replayed(calls, routes)
    with pytest.raises(RouteError, match=r"entered again \(over\)"):
        replay.__enter__()


@alone
def test_two_models_are_in_sessions_at_once_and_a_third_is_native() -> None:
    actor, other, critic = build(**FULL), build(**FULL), build(**FULL)
    routes = {actor: whole_routes(1), other: whole_routes(2)}
    noted = {m: sessions.noted(sessions.routers_of([m])) for m in (actor, other, critic)}
    with contextlib.ExitStack() as stack:
        calls = {model: stack.enter_context(noted[model]) for model in noted}
        logits_of(critic).sum().backward()
        native = calls[critic][:]
        session = {model: stack.enter_context(replaying(model)) for model in (actor, other)}
        losses = []
        for model in (actor, critic, other):
            if model is not critic:
                session[model].load(model, routes[model], layout())
            losses.append(logits_of(model).sum())
        sum(losses).backward()

    for model in (actor, other):
        assert len(calls[model]) == 2 * LAYERS
        assert replayed(calls[model], routes[model])
    again = calls[critic][len(native) :]
    assert len(again) == len(native)
    assert all(torch.equal(a.map, b.map) for a, b in zip(native, again, strict=True))


@alone
def test_a_copy_made_in_a_session_is_native() -> None:
    for flag in (True, False):
        model = build(enable_routing_replay=flag)
        [router, *_] = sessions.routers_of([model]).values()
        before = router.router_replay
        with recording(model):
            copied = copy.deepcopy(router.router_replay)
            hooks = copy.deepcopy(model._forward_hooks)
        assert type(copied) is type(before)
        # The rest of a model cannot be copied: it holds process groups.
        model._forward_hooks = hooks
        with recording(model) as record:
            record.load(model, layout())
            logits_of(model)


@alone
def test_the_low_level_interface_is_refused_in_a_session() -> None:
    model = build(enable_routing_replay=True)
    replay = sessions.routers_of([model])[1].router_replay

    with recording(model) as record:
        with pytest.raises(RouteError, match=r"in a recording\(\) or replaying\(\) block"):
            replay.set_router_replay_action(RouterReplayAction.RECORD)
        record.load(model, layout())
        logits_of(model)

    replay.set_router_replay_action(RouterReplayAction.RECORD)
    with pytest.raises(RouteError, match="clear_router_replay_action"), recording(model):
        pass
