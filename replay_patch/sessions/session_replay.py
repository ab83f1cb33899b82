"""The replay object of a router while its model is in a session.

The session puts one in the place of each router's own, or of none, and the router's code calls it
as it would call its own. So nothing global says which session is on, models without a session stay
as they are, and the config flag is not needed.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from replay_patch.megatron.config import router_cuda_graph
from replay_patch.refusals import Where, refuse
from replay_patch.replay.microbatch_tracker import Load, Tracker
from replay_patch.replay.router_checks import check_selecting, refuse_unknown_class
from replay_patch.replay.selection import Selection, get_replay_topk
from replay_patch.sessions.microbatch import Microbatch
from replay_patch.sessions.report import Report


class SessionReplay:
    """What answers a router while its model is in a session; see `selection.ReplayObject`.

    Attributes:
        layer_index: of the router among the MoE layers of its chunk.
        original: what the router had before; `was_own` if it was an attribute of its own.
        tracker: of the chunk; knows which microbatch a call is for.
        report: of a replaying session; None when recording.
    """

    router_replay_action = "that of a session"  # not None: the router is at work
    mtp_depth = 0

    def __init__(
        self, router: Any, layer_index: int, tracker: Tracker, report: Report | None
    ) -> None:
        self.layer_number: int = router.layer_number
        self.layer_index = layer_index
        self.original: Any = getattr(router, "router_replay", None)
        self.was_own = "router_replay" in vars(router)
        self.tracker, self.report = tracker, report
        self.selections = 0
        # Of the call that runs.
        self._load: Load | None = None
        self._recomputing = False
        self.uncounted_rows: Tensor | None = None

    def enter(self, router: Any) -> None:
        """Take the place of the router's own replay object."""
        router.router_replay = self
        if self.original is not None:
            self.original.in_session = True

    def leave(self, router: Any) -> None:
        """Give the router back what it had before."""
        if self.was_own:
            router.router_replay = self.original
        else:  # the class has None
            del router.router_replay
        if self.original is not None:
            self.original.in_session = False

    # --- a router call ---

    def begin_call(self, router: Any, hidden: Any) -> Callable[[], None]:
        """See `ReplayObject`: find the microbatch of the call, and compare its shape."""
        self._load, self._recomputing = self.tracker.find(self)
        microbatch: Microbatch = self._load.data
        self.uncounted_rows = microbatch.uncounted
        shape: Any = getattr(hidden, "shape", ())
        if len(shape) == 3 and shape[:2] != microbatch.shape:
            self._undo()
            self.end_call()
            refuse(
                f"hidden states of {shape[0]} positions x {shape[1]} sequences",
                "{} x {}, as the layout says (sequence and context parallelism included)".format(
                    *microbatch.shape
                ),
                Where.of(self),
            )
        return self._undo

    def _undo(self) -> None:
        if self._load is not None and not self._recomputing:
            self._load.seen.discard(self.layer_index)

    def choose(self, selection: Selection) -> tuple[Tensor, Tensor]:
        """See `ReplayObject`: captured -> replayed; hole -> the native pick, kept for the
        recompute; padding -> spread evenly (already among the ids)."""
        ids = self._ids(selection)
        self.selections += 1
        # Gathered in every pass: a recompute must save as many tensors as the first forward.
        return selection.scores.gather(1, ids), ids

    def end_call(self) -> None:
        """See `ReplayObject`: a selection outside of a call has no microbatch."""
        self._load = self.uncounted_rows = None

    get_replay_topk = get_replay_topk  # the function, as a method

    def _ids(self, selection: Selection) -> Tensor:
        """int64 [T, K]."""
        load, scores = self._load, selection.scores
        if load is None:
            refuse(
                "experts are selected outside of TopKRouter.forward in a session",
                "a call of the router: elsewhere its microbatch is not known",
                Where.of(self),
            )
        microbatch: Microbatch = load.data
        if len(scores) != microbatch.num_rows:
            refuse(
                f"{len(scores)} router rows",
                f"{microbatch.num_rows}, as the layout says (sequence and context parallelism "
                "included)",
                Where.of(self),
            )
        kept = microbatch.ids[self.layer_index]
        if kept is None:  # recording, first forward
            native = selection.native_ids()
            microbatch.ids[self.layer_index] = native.to(microbatch.dtype)
            return native
        ids: Tensor = kept.to(scores.device, torch.int64)
        if self._recomputing or self.report is None:
            return ids
        if kept.shape[1] != selection.topk:
            expected = f"topk={selection.topk}"
            refuse(f"{kept.shape[1]} experts per token", expected, Where.of(self))
        holes, captured = microbatch.holes, microbatch.captured
        if holes is not None or captured is not None:
            native = selection.native_ids()
            if captured is not None:
                rows = microbatch.counts[0]
                self.report.compare(self.layer_number, ids, native, captured, rows)
            if holes is not None:
                ids = torch.where(holes, native, ids)
                if load.keep:
                    kept.copy_(ids)
        self.report.count(*microbatch.counts)
        return ids

    # A copy of the model, or a checkpoint of it, is not in the session.

    def __deepcopy__(self, memo: Any) -> Any:
        return _outside(copy.deepcopy(self.original, memo))

    def __reduce__(self) -> Any:
        return _outside, (copy.copy(self.original),)


def _outside(original: Any) -> Any:
    if original is not None:
        original.in_session = False
    return original


def check_router(router: Any) -> None:
    """Refuse a router that is in a session, is told to do something else, or cannot be replayed."""
    replay, where = getattr(router, "router_replay", None), Where(router.layer_number)
    if isinstance(replay, SessionReplay):
        refuse("the model is in a session already", "one at a time for one model", where)
    if replay is not None and replay.router_replay_action is not None:
        refuse(
            f"its replay object has the action {replay.router_replay_action}",
            "clear_router_replay_action() before a session",
            where,
        )
    graphed = router_cuda_graph(router.config)
    if graphed:
        refuse(
            f"the router runs inside a CUDA graph ({graphed})",
            "graphs off, or the MoE router outside of them",
            where,
        )
    check_selecting(router)
    refuse_unknown_class(type(router))
