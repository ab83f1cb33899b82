"""Is this router call a recompute, and of which forward? Autograd knows.

Every node of an autograd graph carries a sequence number, which rises along a thread. So the nodes
of one forward have the numbers of a range, and a checkpoint that runs a router again does so while
one of these nodes is running. No order of backward passes is assumed and nothing is queued: a
dropped loss, an exception, a partial recompute or another order of microbatches leaves nothing
behind. An `Entry` lives in the metadata of its own graph and dies with it.

Right for reentrant and non-reentrant checkpoints, also when the backward runs on a device's thread.
What cannot be known raises.
"""

import bisect
import threading
import weakref
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch.autograd import Variable

from replay_patch.refusals import refuse
from replay_patch.replay.output_graph import graph_nodes

# Private, and in every torch from 2.1 on; where one is missing, recompute is refused.
_graph_task: Any = getattr(torch._C, "_current_graph_task_id", None)
_current_node: Any = getattr(torch._C, "_current_autograd_node", None)
_next_number: Any = getattr(torch.autograd, "_get_sequence_nr", None)

KNOWS = None not in (_graph_task, _current_node, _next_number)
"""Whether this torch can tell a recompute."""

_ANCHOR = "replay_patch"


class Span:
    """The sequence numbers of one forward's nodes.

    Attributes:
        start, end: once opened and once closed.
    """

    __slots__ = ("end", "start")

    def __init__(self) -> None:
        self.start: int | None = None
        self.end: int | None = None

    def holds(self, number: int) -> bool:
        """Whether a node with this sequence number belongs to the forward."""
        return (
            self.start is not None
            and self.start <= number
            and (self.end is None or number < self.end)
        )


class Entry(Span):
    """One microbatch loaded for one chunk, and its forward.

    Attributes:
        number: of the load, from 0, for messages.
        data: what was loaded; None once the session is over.
        keep: a recompute may follow.
        seen: places of the routers that have had their first forward.
        chunk: weak.
    """

    __slots__ = ("__weakref__", "chunk", "data", "keep", "number", "seen")

    def __init__(self, number: int, data: Any, chunk: Any) -> None:
        super().__init__()
        self.number, self.data, self.chunk = number, data, weakref.ref(chunk)
        self.keep = torch.is_grad_enabled()
        self.seen: set[int] = set()


class _Nothing:
    """A callback whose end is what counts."""

    def __call__(self) -> None: ...


class Tracker:
    """The forwards of one (unwrapped) model chunk, told apart.

    Args:
        chunk: hooked until `close`.
        recompute: recompute is configured, and a forward that it could not find again is an error.

    Raises:
        RouteError: the chunk has a tracker already, or this torch cannot tell a recompute.
    """

    _chunk: "weakref.ref[Any]"

    def __init__(self, chunk: Any, recompute: bool) -> None:
        if recompute and not KNOWS:
            refuse_torch("recompute is configured")
        hooks = chunk._forward_pre_hooks.values()
        trackers = [getattr(hook, "__self__", None) for hook in hooks]
        if any(isinstance(t, Tracker) and t._chunk() is chunk for t in trackers):
            refuse("the model is in a session already", "one at a time for one model")
        self._recompute = recompute
        self._chunk: Any = weakref.ref(chunk)
        self._current: Entry | None = None
        self._thread: int | None = None
        self._loads = 0
        self._starts: list[int] = []  # rising; of the forwards below
        self._entries: list[weakref.ref[Entry]] = []
        self._backwards: set[int] = set()  # that run, and have recomputed a router
        self._hooks = [
            chunk.register_forward_pre_hook(self._before),
            chunk.register_forward_hook(self._after),
        ]

    def load(self, data: Any) -> Entry:
        """Make a new entry the one that the next forward of the chunk uses.

        Raises:
            RouteError: inside a backward pass.
        """
        if in_backward():
            refuse("load() inside a backward pass", "load() before the forward that it is for")
        self._thread = threading.get_ident()
        self._current = Entry(self._loads, data, self._chunk())
        self._loads += 1
        return self._current

    def find(self, replay: Any) -> tuple[Entry, bool]:
        """The entry of the router call that begins, and whether the call is a recompute.

        Args:
            replay: the router's replay object, with its `place` in the chunk.

        Raises:
            RouteError: it cannot be known, or nothing is loaded.
        """
        place: int = replay.place
        if KNOWS and _graph_task() != -1:
            return self._recomputed(replay), True
        if threading.get_ident() != self._thread:
            refuse(
                "a forward with nothing loaded"
                if self._thread is None
                else "a forward in another thread than that of the session's load()",
                "load() of one microbatch before each forward, in one thread",
                replay,
            )
        entry = self._current
        if entry is None:
            refuse(
                f"a forward with nothing loaded since microbatch {self._loads - 1}",
                "load() of one microbatch before each forward of a chunk",
                replay,
            )
        if place in entry.seen:
            refuse(
                f"a second forward of this router for microbatch {entry.number}",
                "one load() before each forward (a recompute outside of a backward pass, as some "
                "overlap schedules do it, cannot be told from one)",
                replay,
            )
        entry.seen.add(place)
        return entry, False

    def close(self) -> None:
        """Remove the hooks, and drop what is loaded; entries in living graphs remember that."""
        for hook in self._hooks:
            hook.remove()
        living = [entry for ref in self._entries if (entry := ref()) is not None]
        self._current, self._starts, self._entries = None, [], []
        for entry in living:
            entry.data = None
            _remember(entry)

    def _recomputed(self, replay: Any) -> Entry:
        if not torch.is_grad_enabled() or self._nested():
            # Its node may be one of the outer recompute, with a number of another thread.
            refuse(
                "a checkpoint inside the recompute of another one",
                "activation checkpoints that are not nested",
                replay,
            )
        number = _current_node()._sequence_nr()
        i = bisect.bisect_right(self._starts, number) - 1
        entry = self._entries[i]() if i >= 0 else None
        if entry is None or not entry.holds(number) or replay.place not in entry.seen:
            _refuse_ended(number, replay)
            refuse(
                "the recompute of a forward that this session does not know: nothing was loaded "
                "for it (with gradients), it did not run through the chunk's forward, or its "
                "output is gone",
                "load() before that forward, and a loss that is computed from the chunk's output",
                replay,
            )
        return entry

    def _nested(self) -> bool:
        """Whether this backward runs inside another one that has recomputed a router."""
        backward = _graph_task()
        if backward not in self._backwards:
            if self._backwards:
                return True
            self._backwards.add(backward)
            # The engine drops the callback with the backward, also with one that has failed.
            over = _Nothing()
            weakref.finalize(over, self._backwards.discard, backward).atexit = False
            Variable._execution_engine.queue_callback(over)
        return False

    def __deepcopy__(self, memo: Any) -> "Tracker":
        return self  # hooked to a copy of the chunk, where it does nothing

    def _before(self, chunk: Any, args: Any) -> None:
        entry = self._current if chunk is self._chunk() else None
        if entry is None or entry.start is not None or not KNOWS or in_backward():
            return
        if entry.keep and torch.is_grad_enabled():
            entry.start = _next_number()
            alive = [i for i, ref in enumerate(self._entries) if ref() is not None]
            self._starts = [self._starts[i] for i in alive] + [entry.start]
            self._entries = [self._entries[i] for i in alive] + [weakref.ref(entry)]

    def _after(self, chunk: Any, args: Any, output: Any) -> None:
        entry = self._current if chunk is self._chunk() else None
        if entry is None or in_backward():
            return
        self._current = None
        if entry.start is None:  # no backward follows: nothing is kept
            return
        entry.end = _next_number()
        if (
            not anchor(entry, output)
            and self._recompute
            and any(p.requires_grad for p in chunk.parameters())
        ):
            refuse_output(f"of microbatch {entry.number} ({type(output).__name__})")


def refuse_torch(what: str) -> NoReturn:
    """Raise RouteError: this torch cannot tell a recompute, and `what` needs it to."""
    refuse(
        f"{what}, and torch {torch.__version__} does not say which forward a recompute belongs to",
        "torch 2.1 or later, or no recompute",
    )


def refuse_output(which: str) -> NoReturn:
    """Raise RouteError: recompute is configured, and nothing in an output can be followed."""
    refuse(
        f"recompute is configured, and the output {which} has no tensor with a gradient that would "
        "tell its recompute from others",
        "a tensor, or a mapping, list, tuple or dataclass with tensors",
    )


def in_backward() -> bool:
    """Whether this code runs inside a backward pass."""
    return graph_task() != -1


def graph_task() -> int:
    """Which backward pass this code runs inside of; -1 for none."""
    return int(_graph_task()) if KNOWS else -1


def next_number() -> int:
    """The sequence number of this thread's next node."""
    return int(_next_number())


def current_number() -> int:
    """The sequence number of the node that the running backward pass is at."""
    return int(_current_node()._sequence_nr())


# --- after the session ------------------------------------------------------------------------

ended: dict[int, "weakref.ref[Entry]"] = {}
"""Entries of sessions that are over, while their graph lives."""

any_ended = [False]
"""Whether there are some: what a compiled router may look at without a guard on each entry."""


def check_ended(router: Any) -> None:
    """Refuse the recompute of a forward that ran in a session, now that the session is over.

    Args:
        router: a router that is not in a session; called only while `any_ended`.
    """
    if not in_backward():
        return
    number = _current_node()._sequence_nr()
    for ref in list(ended.values()):
        entry = ref()
        chunk = None if entry is None or not entry.holds(number) else entry.chunk()
        if chunk is not None and any(module is router for module in chunk.modules()):
            where = SimpleNamespace(layer_number=router.layer_number, mtp_depth=0)
            _refuse_ended(number, where)


def _remember(entry: Entry) -> None:
    key = id(entry)

    def forget(_: Any) -> None:
        ended.pop(key, None)
        any_ended[0] = bool(ended)

    ended[key] = weakref.ref(entry, forget)
    any_ended[0] = True


def _refuse_ended(number: int, replay: Any) -> None:
    for ref in list(ended.values()):
        entry = ref()
        if entry is not None and entry.holds(number):
            refuse(
                f"backward after the session ended: a recompute of microbatch {entry.number}",
                "the backward inside the recording() or replaying() block of its forward",
                replay,
            )


def anchor(entry: Any, output: Any) -> bool:
    """Keep `entry` alive as long as the graph of `output`; False if there is no graph."""
    anchored = False
    for node in graph_nodes(output):
        entries = node.metadata.setdefault(_ANCHOR, [])
        if entry not in entries:
            entries.append(entry)
        anchored = True
    return anchored
