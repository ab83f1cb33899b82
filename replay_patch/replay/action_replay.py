"""A router that records or replays by action: RECORD, REPLAY_FORWARD or REPLAY_BACKWARD.
T tokens, E experts, K top-k."""

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from replay_patch.megatron.parallel_ranks import gathers_rows
from replay_patch.refusals import Where, refuse
from replay_patch.replay import target_ids
from replay_patch.replay.router_checks import check_capture, check_selecting
from replay_patch.replay.selection import Selection

# Values of RouterReplayAction, Megatron's and ours alike.
RECORD, REPLAY_FORWARD, REPLAY_BACKWARD = "record", "replay_forward", "replay_backward"


class ActionReplay:
    """What a `RouterReplay` has beyond Megatron's surface; see `selection.ReplayObject`.
    Ours derives from it; Megatron's own class gets the same by the patch `native_router_replay`.

    Attributes:
        mtp_depth: 0 in the decoder, else the place of the block in `mtp.layers`, from 1.
        num_experts, topk: E and K of the router; None while there is none.
        graphed: the config field by which the router runs inside a CUDA graph; None: it does not.
        in_session: the router is in a recording() or replaying() block.
        native_rows: rows of host targets that routed natively because they repeat an expert.
        invalid_ids: bool scalar on a device: whether ids there were wrong; see `target_ids`.
        frozen: (target, ids that wait for the recompute in its place), where the two differ.
    """

    # Of RouterReplay; see there.
    layer_number: int | None
    router_replay_action: Enum | None
    target_topk_idx: Tensor | None
    recorded_topk_idx: Tensor | None
    replay_backward_list: list[Tensor]
    record_indices: Callable[[Tensor], None]

    mtp_depth: int = 0
    num_experts: int | None = None
    topk: int | None = None
    graphed: str | None = None
    in_session: bool = False
    native_rows: int = 0
    selections: int = 0
    invalid_ids: Tensor | None = None
    frozen: tuple[tuple[Tensor, Tensor], ...] = ()

    uncounted_rows: Tensor | None = None

    def begin_call(self, router: Any, hidden: Any) -> Callable[[], None]:
        """See `ReplayObject`: refuse targets that do not fit the router or its input."""
        check_selecting(router)
        action = self._action_value()
        if action != RECORD:
            check_capture(self)
            num_tokens = None
            if hidden is not None and not gathers_rows(router.config):
                num_tokens = hidden.shape[:-1].numel()
            experts = router.config.num_moe_experts
            target_ids.check(self._next_target(action), self, experts, router.topk, num_tokens)
        before = {name: getattr(self, name) for name in ("recorded_topk_idx", "native_rows")}
        queue = list(self.replay_backward_list)

        def undo() -> None:
            vars(self).update(before)
            self.replay_backward_list[:] = queue

        return undo

    def choose(self, selection: Selection) -> tuple[Tensor, Tensor]:
        """Do what the action says; see `ReplayObject`.
        Raises RouteError, and changes nothing, if there is no target or it does not fit."""
        action, scores = self._action_value(), selection.scores
        if action == RECORD:
            values, ids = selection.native_choice()
            self.record_indices(ids)
            self.selections += 1
            return values, ids

        target = self._next_target(action)
        target_ids.check(target, self, scores.shape[1], selection.topk, scores.shape[0])
        ids, native = target_ids.usable_ids(target, self, scores)
        masked = target_ids.native_rows(target, scores)
        if masked is not None:
            native = masked if native is None else native | masked
        if native is not None:
            ids = torch.where(native.unsqueeze(1), selection.native_ids(), ids)
            if action == REPLAY_FORWARD:
                self._freeze(target, ids, scores.shape[1])
        if action == REPLAY_BACKWARD:
            done = self.replay_backward_list.pop(0)
            self.frozen = tuple(pair for pair in self.frozen if pair[1] is not done)
        self.selections += 1
        return scores.gather(1, ids), ids

    def end_call(self) -> None:
        """See `ReplayObject`; an action lasts longer than a call, so nothing is forgotten."""

    def _action_value(self) -> str:
        value = getattr(self.router_replay_action, "value", None)
        if value not in (RECORD, REPLAY_FORWARD, REPLAY_BACKWARD):
            found = f"action {self.router_replay_action!r}"
            refuse(found, "a RouterReplayAction", Where.of(self))
        return str(value)

    def _next_target(self, action: str) -> Tensor:
        """The ids to take next. Raises RouteError if there are none."""
        if action == REPLAY_FORWARD:
            if self.target_topk_idx is None:
                refuse(
                    f"{action} (selection {self.selections} of this router) with no target",
                    "set_target_indices() before the forward; natively routed layers need no "
                    "action",
                    Where.of(self),
                )
            return self.target_topk_idx
        if not self.replay_backward_list:
            refuse(
                f"{action} (selection {self.selections} of this router) with no target left: every "
                "microbatch that was set has been replayed",
                "one set_target_indices() per microbatch that is recomputed",
                Where.of(self),
            )
        return self.replay_backward_list[0]

    def _freeze(self, target: Tensor, ids: Tensor, num_experts: int) -> None:
        """Let the recompute of this microbatch see the natively picked rows of its last forward.
        The same tensor may be queued for several microbatches: the first that has not run is this
        one. If all have run, it is another forward of the last (log-probs first, then training)."""
        queue = self.replay_backward_list
        waiting = [i for i, queued in enumerate(queue) if queued is target]
        if not waiting:
            run = {id(frozen) for unfrozen, frozen in self.frozen if unfrozen is target}
            waiting = [i for i, queued in enumerate(queue) if id(queued) in run][-1:]
        if waiting:
            fits = num_experts - 1 <= torch.iinfo(target.dtype).max
            queue[waiting[0]] = ids.to(target.dtype) if fits else ids
            in_queue = [pair for pair in self.frozen if any(pair[1] is ids for ids in queue)]
            self.frozen = (*in_queue, (target, queue[waiting[0]]))
