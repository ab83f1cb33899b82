"""The replay object of a router while its model is in a session.

The session puts one in the place of each router's own, or of none, and the router's code calls it
as it would call its own. So nothing global says which session is on, models without a session stay
as they are, and the config flag is not needed.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from replay_patch.megatron.config import router_cuda_graph
from replay_patch.patching.compiling import opaque
from replay_patch.refusals import refuse
from replay_patch.replay import recompute, selection
from replay_patch.replay.router_call import check_selecting
from replay_patch.sessions.microbatch import Microbatch


class SessionReplay:
    """The replay object of one router while its model is in a session.

    Attributes:
        place: of the router among the MoE layers of its chunk.
        original: what the router had before; `was_own` if it was an attribute of its own.
        microbatch: of the call that runs; `recomputing` and `keep` (for a recompute) belong to it.
        report: of a replaying session.
    """

    router_replay_action = selection.SESSION
    mtp_depth = 0

    def __init__(self, router: Any, place: int, tracker: recompute.Tracker, report: Any) -> None:
        self.place, self.layer_number = place, router.layer_number
        self.original = getattr(router, "router_replay", None)
        self.was_own = "router_replay" in vars(router)
        self.tracker, self.report = tracker, report
        self.microbatch: Microbatch | None = None
        self.recomputing = self.keep = False
        self._seen: set[int] = set()
        self.selections = 0

    def begin(self) -> Callable[[], None]:
        """Find the microbatch of the router call that begins.

        Returns:
            What takes back the call's traces if it fails.

        Raises:
            RouteError: it cannot be known.
        """
        entry, self.recomputing = self.tracker.find(self)
        self.microbatch, self.keep, self._seen = entry.data, entry.keep, entry.seen
        return self._undo

    def _undo(self) -> None:
        if not self.recomputing:
            self._seen.discard(self.place)

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As of a RouterReplay; see `selection.choose`."""
        if default_compute_topk is None:
            refuse("get_replay_topk() without default_compute_topk", "the native selection", self)
        return _choose(self, scores, topk, num_groups, group_topk, default_compute_topk)

    # A copy of the model, or a checkpoint of it, is not in the session.

    def __deepcopy__(self, memo: Any) -> Any:
        return _outside(copy.deepcopy(self.original, memo))

    def __reduce__(self) -> Any:
        return _outside, (copy.copy(self.original),)


_choose = opaque(selection.choose)


def _outside(original: Any) -> Any:
    if original is not None:
        original.in_session = False
    return original


def check_router(router: Any) -> None:
    """Refuse a router that is in a session, is told to do something else, or cannot be replayed."""
    from replay_patch.patches.megatron.router_guard import refuse_unknown

    replay = getattr(router, "router_replay", None)
    where = _Where(router.layer_number)
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
    check_selecting(router, where)
    refuse_unknown(type(router))


@dataclass
class _Where:
    """A router, for messages."""

    layer_number: int | None
    mtp_depth: int = 0
