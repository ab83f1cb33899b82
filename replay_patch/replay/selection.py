"""The one place where expert ids are chosen: the replayed ones, or the native ones.

A *replay object* here is a `RouterReplay`, Megatron's own (0.16 on, with our patch on it) or ours
(`replay_patch.replay.router_replay`, before that), or the `SessionReplay` of a router in a session.
T tokens, E experts, K top-k.
"""

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from replay_patch.refusals import describe, refuse, warn_once
from replay_patch.replay import target_ids

# Values of RouterReplayAction, Megatron's and ours alike.
RECORD, REPLAY_FORWARD, REPLAY_BACKWARD = "record", "replay_forward", "replay_backward"


class SessionAction(Enum):
    """The one action of a router in a recording() or replaying() block."""

    SESSION = "session"


SESSION = SessionAction.SESSION


def choose(
    replay: Any,
    scores: Tensor,
    topk: int,
    num_groups: int | None,
    group_topk: int | None,
    native: Callable[..., tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """The final expert selection of one router call, as the replay object's action says.

    Args:
        replay: its `router_replay_action` is not None.
        scores: [T, E], what the release selects on (logits, scores, or scores plus bias).
        native: the release's own selection, `native(scores, topk, num_groups, group_topk)`.

    Returns:
        (values, ids), each [T, K]: ids int64 in captured column order, values = scores at them.

    Raises:
        RouteError: no target, or a target that does not fit; the replay object is unchanged.
    """
    if replay.router_replay_action is SESSION:
        # Gathered in every pass: a recompute must save as many tensors as the first forward.
        ids = _in_session(replay, scores, topk, num_groups, group_topk, native)
        replay.selections += 1
        return scores.gather(1, ids), ids

    kind = kind_of(replay)
    if kind == RECORD:
        values, ids = native(scores, topk, num_groups=num_groups, group_topk=group_topk)
        replay.record_indices(ids)
        replay.selections += 1
        return values, ids

    target = target_of(replay, kind)
    target_ids.check(target, replay, scores.shape[1], topk, scores.shape[0])
    ids, repeating = target_ids.usable(target, replay, scores)
    native_rows = target_ids.native_rows(target, scores)
    if native_rows is not None:
        repeating = native_rows if repeating is None else repeating | native_rows
    if repeating is not None:
        # detach: the recompute, which has these ids, must save as many tensors for the backward.
        picked = native(scores.detach(), topk, num_groups=num_groups, group_topk=group_topk)[1]
        ids = torch.where(repeating.unsqueeze(1), picked, ids)
        if kind == REPLAY_FORWARD:
            _freeze(replay, target, ids, scores.shape[1])
    if kind == REPLAY_BACKWARD:
        done = replay.replay_backward_list.pop(0)
        replay.frozen = tuple(pair for pair in replay.frozen if pair[1] is not done)
    replay.selections += 1
    return scores.gather(1, ids), ids


def _in_session(
    replay: Any,
    scores: Tensor,
    topk: int,
    num_groups: int | None,
    group_topk: int | None,
    native: Callable[..., tuple[Tensor, Tensor]],
) -> Tensor:
    """int64 [T, K]: captured -> replayed; hole -> the native pick, kept for the recompute;
    padding -> spread evenly (already among the ids)."""
    microbatch, place = replay.microbatch, replay.place
    if microbatch is None:
        refuse(
            "experts are selected outside of TopKRouter.forward in a session",
            "a call of the router: elsewhere its microbatch is not known",
            replay,
        )
    if len(scores) != microbatch.num_rows:
        refuse(
            f"{len(scores)} router rows",
            f"{microbatch.num_rows}, as the layout says (sequence and context parallelism "
            "included)",
            replay,
        )
    kept = microbatch.ids[place]
    if kept is None:  # recording, first forward
        picked = native(scores.detach(), topk, num_groups=num_groups, group_topk=group_topk)[1]
        microbatch.ids[place] = picked.to(microbatch.dtype)
        return picked
    ids: Tensor = kept.to(scores.device, torch.int64)
    if replay.recomputing or replay.report is None:
        return ids
    if kept.shape[1] != topk:
        refuse(f"{kept.shape[1]} experts per token", f"topk={topk}", replay)
    holes, captured = microbatch.holes, microbatch.captured
    if holes is not None or captured is not None:
        picked = native(scores.detach(), topk, num_groups=num_groups, group_topk=group_topk)[1]
        if captured is not None:
            rows = microbatch.counts[0]
            replay.report.compare(replay.layer_number, ids, picked, captured, rows)
        if holes is not None:
            ids = torch.where(holes, picked, ids)
            if replay.keep:
                kept.copy_(ids)
    replay.report.count(*microbatch.counts)
    return ids


def warn_unfused(replay: Any) -> None:
    """Say once that the fused kernel is not used; it takes no expert ids."""
    warn_once(
        "moe_router_fusion: the router of %s runs unfused while it records or replays",
        describe(replay),
    )


def refuse_precomputed(replay: Any) -> None:
    """Raise RouteError: the caller has chosen the experts already."""
    refuse("precomputed expert ids", "a router that selects by top-k", replay)


# --- helpers ----------------------------------------------------------------------------------


def kind_of(replay: Any) -> str:
    """The value of its action. Raises RouteError if that is none."""
    kind = getattr(replay.router_replay_action, "value", None)
    if kind not in (RECORD, REPLAY_FORWARD, REPLAY_BACKWARD):
        refuse(f"action {replay.router_replay_action!r}", "a RouterReplayAction", replay)
    return str(kind)


def target_of(replay: Any, kind: str) -> Any:
    """The ids that a replay object is told to take next. Raises RouteError if it has none."""
    if kind == REPLAY_FORWARD:
        if replay.target_topk_idx is None:
            refuse(
                f"{kind} (selection {replay.selections} of this router) with no target",
                "set_target_indices() before the forward; natively routed layers need no action",
                replay,
            )
        return replay.target_topk_idx
    if not replay.replay_backward_list:
        refuse(
            f"{kind} (selection {replay.selections} of this router) with no target left: every "
            "microbatch that was set has been replayed",
            "one set_target_indices() per microbatch that is recomputed",
            replay,
        )
    return replay.replay_backward_list[0]


def _freeze(replay: Any, target: Tensor, ids: Tensor, num_experts: int) -> None:
    """Let the recompute of this microbatch see the natively picked rows of its last forward.

    The same tensor may be queued for several microbatches: the first that has not run is this one.
    If all have run, it is another forward of the last (log-probs first, then training).
    """
    queue = replay.replay_backward_list
    places = [i for i, waiting in enumerate(queue) if waiting is target]
    if not places:
        run = {id(frozen) for of, frozen in replay.frozen if of is target}
        places = [i for i, waiting in enumerate(queue) if id(waiting) in run][-1:]
    if places:
        fits = num_experts - 1 <= torch.iinfo(target.dtype).max
        queue[places[0]] = ids.to(target.dtype) if fits else ids
        kept = [p for p in replay.frozen if any(p[1] is waiting for waiting in queue)]
        replay.frozen = (*kept, (target, queue[places[0]]))
