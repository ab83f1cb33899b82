"""Which loaded microbatch a router call of a session belongs to, be it a forward or a recompute.

Nothing is queued, and backward passes may come in any order; see `replay_patch.replay.recompute`. A
dropped loss, an exception, a partial recompute or another order of microbatches leaves nothing
behind. A `Load` lives in the metadata of its own graph and dies with it. What cannot be known
raises.
"""

import threading
import weakref
from typing import Any, Protocol

import torch
from torch.autograd import Variable

from replay_patch.refusals import Where, refuse
from replay_patch.replay import recompute


class TrackedRouter(Protocol):
    """A router of the chunk, and its index among the MoE layers of the chunk."""

    layer_index: int

    @property
    def layer_number(self) -> int | None:
        """Megatron's, from 1."""


class Load:
    """One microbatch loaded for one chunk, and its forward.

    Attributes:
        number: of the load, from 0, for messages.
        data: what was loaded; None once the session is over.
        keep: a recompute may follow.
        seen: indices of the routers that have had their first forward.
        chunk: weak.
        span: the nodes of its forward; None before it, and where no recompute can follow.
    """

    __slots__ = ("__weakref__", "chunk", "data", "keep", "number", "seen", "span")

    def __init__(self, number: int, data: Any, chunk: Any) -> None:
        self.number, self.data, self.chunk = number, data, weakref.ref(chunk)
        self.keep = torch.is_grad_enabled()
        self.seen: set[int] = set()
        self.span: recompute.Span[Load] | None = None

    def holds(self, number: int) -> bool:
        """Whether a node with this sequence number belongs to its forward."""
        return self.span is not None and self.span.holds(number)


class _EndOfBackward:
    """A callback for autograd's engine, which drops it at the end of the backward pass, also of one
    that fails. The finalizer of this object is what is wanted; called, it does nothing."""

    def __call__(self) -> None: ...


class Tracker:
    """The forwards of one (unwrapped) model chunk, told apart. The chunk is hooked until `close`.
    `recomputes`: recompute is configured, and a forward that it could not find again is an error.
    Raises RouteError if the chunk has a tracker already, or this torch cannot tell a recompute."""

    _chunk: "weakref.ref[Any]"

    def __init__(self, chunk: Any, recomputes: bool) -> None:
        if recomputes and not recompute.KNOWS:
            recompute.refuse_torch("recompute is configured")
        hooks = chunk._forward_pre_hooks.values()
        trackers = [getattr(hook, "__self__", None) for hook in hooks]
        if any(isinstance(t, Tracker) and t._chunk() is chunk for t in trackers):
            refuse("the model is in a session already", "one at a time for one model")
        self._recomputes = recomputes
        self._chunk = weakref.ref(chunk)
        self._current: Load | None = None
        self._thread: int | None = None
        self._loads = 0
        self._forwards = recompute.Forwards[Load]()
        self._backwards: set[int] = set()  # that run, and have recomputed a router
        self._hooks = [
            chunk.register_forward_pre_hook(self._before),
            chunk.register_forward_hook(self._after),
        ]

    def load(self, data: Any) -> Load:
        """Make a new load the one that the next forward of the chunk uses.
        Raises RouteError inside a backward pass."""
        if recompute.in_backward():
            refuse("load() inside a backward pass", "load() before the forward that it is for")
        self._close_span()
        self._thread = threading.get_ident()
        self._current = Load(self._loads, data, self._chunk())
        self._loads += 1
        return self._current

    def find(self, router: TrackedRouter) -> tuple[Load, bool]:
        """The load of the router call that begins, and whether the call is a recompute.
        Raises RouteError if it cannot be known, or nothing is loaded."""
        if recompute.in_backward():
            return self._recomputed(router), True
        if threading.get_ident() != self._thread:
            refuse(
                "a forward with nothing loaded"
                if self._thread is None
                else "a forward in another thread than that of the session's load()",
                "load() of one microbatch before each forward, in one thread",
                Where.of(router),
            )
        load = self._current
        if load is None:
            refuse(
                f"a forward with nothing loaded since microbatch {self._loads - 1}",
                "load() of one microbatch before each forward of a chunk",
                Where.of(router),
            )
        if router.layer_index in load.seen:
            refuse(
                f"a second forward of this router for microbatch {load.number}",
                "one load() before each forward (a recompute outside of a backward pass, as some "
                "overlap schedules do it, cannot be told from one)",
                Where.of(router),
            )
        load.seen.add(router.layer_index)
        return load, False

    def close(self) -> None:
        """Remove the hooks, and drop what is loaded; loads in living graphs remember that."""
        for hook in self._hooks:
            hook.remove()
        self._close_span()
        living = self._forwards.living()
        self._current = None
        self._forwards.clear()
        for load in living:
            load.data = None
            _remember_ended(load)

    def _recomputed(self, router: TrackedRouter) -> Load:
        if not torch.is_grad_enabled() or self._nested():
            # Its node may be one of the outer recompute, with a number of another thread.
            refuse(
                "a checkpoint inside the recompute of another one",
                "activation checkpoints that are not nested",
                Where.of(router),
            )
        number = recompute.current_number()
        span = self._forwards.find(number)
        load = None if span is None else span.forward()
        if load is None or router.layer_index not in load.seen:
            _refuse_ended(number, Where.of(router))
            refuse(
                "the recompute of a forward that this session does not know: nothing was loaded "
                "for it (with gradients), it did not run through the chunk's forward, or its "
                "output is gone",
                "load() before that forward, and a loss that is computed from the chunk's output",
                Where.of(router),
            )
        return load

    def _nested(self) -> bool:
        """Whether this backward runs inside another one that has recomputed a router."""
        backward = recompute.backward_pass()
        if backward not in self._backwards:
            if self._backwards:
                return True
            self._backwards.add(backward)
            end = _EndOfBackward()
            weakref.finalize(end, self._backwards.discard, backward).atexit = False
            Variable._execution_engine.queue_callback(end)
        return False

    def __deepcopy__(self, memo: Any) -> "Tracker":
        return self  # hooked to a copy of the chunk, where it does nothing

    def _before(self, chunk: Any, args: Any) -> None:
        load = self._current if chunk is self._chunk() else None
        if load is None or load.span is not None or not recompute.KNOWS or recompute.in_backward():
            return
        if load.keep and torch.is_grad_enabled():
            load.span = self._forwards.open(load)

    def _after(self, chunk: Any, args: Any, output: Any) -> None:
        load = self._current if chunk is self._chunk() else None
        if load is None or recompute.in_backward():
            return
        self._close_span()
        self._current = None
        if load.span is None:  # no backward follows: nothing is kept
            return
        if (
            not recompute.anchor(load, output)
            and self._recomputes
            and any(p.requires_grad for p in chunk.parameters())
        ):
            recompute.refuse_output(f"of microbatch {load.number} ({type(output).__name__})")

    def _close_span(self) -> None:
        """The forward of the current load is over, or has failed."""
        if self._current is not None and self._current.span is not None:
            self._current.span.close()


# --- after the session ------------------------------------------------------------------------

ended_loads: dict[int, "weakref.ref[Load]"] = {}
"""Loads of sessions that are over, while their graph lives."""

any_ended = [False]
"""Whether there are any; a compiled router can look at this without a guard on each load."""


def check_ended(router: Any) -> None:
    """Refuse the recompute of a forward that ran in a session, now that the session is over.
    The router is in no session; called only while `any_ended`."""
    if not recompute.in_backward():
        return
    number = recompute.current_number()
    for ref in list(ended_loads.values()):
        load = ref()
        chunk = None if load is None or not load.holds(number) else load.chunk()
        if chunk is not None and any(module is router for module in chunk.modules()):
            _refuse_ended(number, Where(router.layer_number))


def _remember_ended(load: Load) -> None:
    key = id(load)

    def forget(_: Any) -> None:
        ended_loads.pop(key, None)
        any_ended[0] = bool(ended_loads)

    ended_loads[key] = weakref.ref(load, forget)
    any_ended[0] = True


def _refuse_ended(number: int, where: Where) -> None:
    for ref in list(ended_loads.values()):
        load = ref()
        if load is not None and load.holds(number):
            refuse(
                f"backward after the session ended: a recompute of microbatch {load.number}",
                "the backward inside the recording() or replaying() block of its forward",
                where,
            )
