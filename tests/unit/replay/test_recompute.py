"""`Tracker` on plain torch: every kind of checkpoint, any order; and what it refuses.

A "router" here is a module that asks the tracker what its call is.
"""

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from replay_patch.errors import RouteError
from replay_patch.replay import recompute
from replay_patch.replay.microbatch_tracker import Tracker, check_ended, ended_loads


class Router(nn.Module):
    """Doubles its input, and notes (microbatch, whether it was a recompute) of each call."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.place, self.layer_number, self.mtp_depth = place, place + 1, 0
        self.tracker: Any = None
        self.calls: list[tuple[Any, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.tracker is not None:
            entry, recompute = self.tracker.find(self)
            self.calls.append((entry.data, recompute))
        return (x * 2).sin()


class Chunk(nn.Module):
    """Two routers, the first of them in a checkpoint of this kind: True is reentrant."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.routers = nn.ModuleList([Router(0), Router(1)])
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.weight
        first, second = self.routers
        if self.reentrant is None:
            return second(first(x))
        return second(checkpoint(first, x, use_reentrant=self.reentrant))


def tracked(reentrant: bool | None = True, recomputes: bool = True) -> tuple[Chunk, Tracker]:
    chunk = Chunk(reentrant)
    tracker = Tracker(chunk, recomputes)
    for router in chunk.routers:
        router.tracker = tracker
    return chunk, tracker


def run(chunk: Chunk, tracker: Tracker, data: Any) -> Tensor:
    tracker.load(data)
    return chunk(torch.ones(3))


KINDS = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])


@KINDS
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_a_recompute_finds_its_forward_in_any_order(
    reentrant: bool, order: tuple[int, ...]
) -> None:
    chunk, tracker = tracked(reentrant)
    losses = [run(chunk, tracker, f"microbatch {i}").sum() for i in range(3)]

    for i in order:
        losses[i].backward()

    first = [(f"microbatch {i}", False) for i in range(3)]
    assert chunk.routers[0].calls == [*first, *((f"microbatch {i}", True) for i in order)]
    assert chunk.routers[1].calls == first  # partial: this one is not recomputed


@KINDS
def test_gradients_of_one_sum_and_a_second_backward(reentrant: bool) -> None:
    chunk, tracker = tracked(reentrant)
    losses = [run(chunk, tracker, i).sum() for i in range(2)]

    sum(losses).backward(retain_graph=True)
    del chunk.routers[0].calls[:]
    losses[0].backward()

    assert chunk.routers[0].calls == [(0, True)]


@KINDS
def test_a_backward_in_another_thread(reentrant: bool) -> None:
    chunk, tracker = tracked(reentrant)
    losses = [run(chunk, tracker, i).sum() for i in range(2)]

    thread = threading.Thread(target=losses[0].backward)
    thread.start()
    thread.join()

    assert chunk.routers[0].calls[2:] == [(0, True)]


@KINDS
def test_a_dropped_forward_leaves_nothing(reentrant: bool) -> None:
    chunk, tracker = tracked(reentrant)
    dropped = run(chunk, tracker, 0)
    entry = weakref.ref(dropped.grad_fn.metadata["replay_patch"][0])
    loss = run(chunk, tracker, 1).sum()

    del dropped
    gc.collect()

    assert entry() is None
    loss.backward()
    assert chunk.routers[0].calls[-1] == (1, True)


def test_an_exception_in_a_forward_leaves_nothing() -> None:
    chunk, tracker = tracked()
    tracker.load(0)
    with pytest.raises(RuntimeError, match="size of tensor"):
        chunk(torch.ones(4))

    run(chunk, tracker, 1).sum().backward()

    assert chunk.routers[0].calls == [(1, False), (1, True)]


def test_without_gradients_nothing_is_kept() -> None:
    chunk, tracker = tracked()
    with torch.no_grad():
        entry = weakref.ref(tracker.load(0))
        chunk(torch.ones(3))

    assert entry() is None


def test_a_module_parameter_keeps_no_entry() -> None:
    chunk = nn.Linear(3, 3)
    tracker = Tracker(chunk, False)
    entry = weakref.ref(tracker.load(0))
    out = chunk(torch.ones(2, 3))
    accumulate = [node for node, _ in out.grad_fn.next_functions if hasattr(node, "variable")]

    assert accumulate
    assert entry() is not None
    del out
    assert entry() is None


def test_a_view_that_is_changed_in_place_keeps_its_entry() -> None:
    chunk, tracker = tracked()
    plain = chunk.forward
    chunk.forward = lambda x: plain(x).view(1, 3)  # type: ignore[method-assign]
    logits = run(chunk, tracker, 0)
    logits.div_(2)
    other = run(chunk, tracker, 1)
    gc.collect()

    logits.sum().backward()

    assert chunk.routers[0].calls[-1] == (0, True)
    assert other is not None


# --- refusals ---------------------------------------------------------------------------------


def test_checkpoints_inside_of_checkpoints_are_refused() -> None:
    chunk, tracker = tracked()
    first, _ = chunk.routers
    inner = first.forward

    def nested(x: Tensor) -> Tensor:
        return checkpoint(lambda y: checkpoint(inner, y, use_reentrant=True), x, use_reentrant=True)

    chunk.forward = lambda x: nested(x * chunk.weight)  # type: ignore[method-assign]

    with pytest.raises(RouteError, match="layer 1: a checkpoint inside the recompute of another"):
        run(chunk, tracker, 0).sum().backward()


def test_so_they_are_though_a_device_thread_has_numbers_of_its_own() -> None:
    chunk, tracker = tracked()
    first, _ = chunk.routers

    def nested(x: Tensor) -> Tensor:
        def inner(y: Tensor) -> Tensor:
            return checkpoint(first, y, use_reentrant=False)

        return checkpoint(inner, x, use_reentrant=True)

    chunk.forward = lambda x: nested(x * chunk.weight)  # type: ignore[method-assign]
    other = run(chunk, tracker, 0)
    [entry] = other.grad_fn.metadata["replay_patch"]
    loss = run(chunk, tracker, 1).sum()
    errors: list[Any] = []

    def backward() -> None:
        # The recompute's nodes get numbers that are those of microbatch 0 in the main thread.
        while torch.autograd._get_sequence_nr() < entry.span.start:
            (chunk.weight * 1).detach()
        try:
            loss.backward()
        except RouteError as error:
            errors.append(str(error))

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()

    assert [call for call in first.calls if call[1]] == [(1, True)]  # and not microbatch 0
    assert "layer 1: a checkpoint inside the recompute of another one" in errors[0]


def test_after_a_backward_that_failed_the_next_one_is_right() -> None:
    chunk, tracker = tracked()
    loss = run(chunk, tracker, 0).sum()
    hook = chunk.routers[0].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    hook.remove()

    run(chunk, tracker, 1).sum().backward()

    assert chunk.routers[0].calls[-1] == (1, True)


def test_a_router_is_called_once_for_each_load() -> None:
    chunk, tracker = tracked()
    tracker.load(7)
    x = torch.ones(3)
    chunk.routers[0](x)

    with pytest.raises(RouteError, match="layer 1: a second forward of this router for microbatch"):
        chunk.routers[0](x)


def test_a_loss_that_does_not_go_through_the_output_is_refused() -> None:
    chunk, tracker = tracked()
    taken: list[Tensor] = []
    chunk.routers[0].register_forward_hook(lambda _, args, out: taken.append(out))
    plain = chunk.forward
    hidden: list[Tensor] = []
    chunk.forward = lambda x: hidden.append(plain(x)) or chunk.weight * 1  # type: ignore

    run(chunk, tracker, 0)

    with pytest.raises(RouteError, match="recompute of a forward that this session does not know"):
        hidden[0].sum().backward()


def test_a_forward_without_the_chunks_call_is_refused_in_the_recompute() -> None:
    chunk, tracker = tracked()
    tracker.load(0)
    loss = chunk.forward(torch.ones(3)).sum()

    with pytest.raises(RouteError, match="did not run through the chunk's forward"):
        loss.backward()


def test_an_old_torch_is_refused_where_recompute_is_configured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recompute, "KNOWS", False)

    with pytest.raises(RouteError, match="does not say which forward"):
        Tracker(Chunk(None), recomputes=True)
    chunk, tracker = tracked(None, recomputes=False)
    run(chunk, tracker, 0).sum().backward()
    assert [router.calls for router in chunk.routers] == [[(0, False)]] * 2


def test_after_closing_living_graphs_are_known_as_ended() -> None:
    chunk, tracker = tracked()
    loss = run(chunk, tracker, torch.ones(3)).sum()
    [entry] = loss.grad_fn.next_functions[0][0].metadata["replay_patch"]

    tracker.close()

    assert entry.data is None
    assert len(ended_loads) == 1
    assert not chunk._forward_hooks
    for router in chunk.routers:
        router.tracker = None
    chunk.routers[0].register_forward_pre_hook(lambda router, _: check_ended(router))
    with pytest.raises(RouteError, match="layer 1: backward after the session ended"):
        loss.backward()
    del loss, entry
    gc.collect()
    assert not ended_loads


def test_a_chunk_has_one_tracker_at_a_time() -> None:
    chunk, tracker = tracked()

    with pytest.raises(RouteError, match="in a session already"):
        Tracker(chunk, False)

    tracker.close()
    Tracker(chunk, False)
