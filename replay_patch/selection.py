"""The one place where expert ids are chosen: the replayed ones, or the native ones.

A *replay object* here is a `RouterReplay`, Megatron's own (0.16 on, with our patch on it) or ours
(`replay_patch.router_replay`, before that). T tokens, E experts, K top-k.
"""

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint
from torch import Tensor

from replay_patch import targets
from replay_patch.hooks import when_imported
from replay_patch.targets import describe, refuse, warn_once

_Function = TypeVar("_Function", bound=Callable[..., Any])

# Values of RouterReplayAction, Megatron's and ours alike.
RECORD, REPLAY_FORWARD, REPLAY_BACKWARD = "record", "replay_forward", "replay_backward"


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
    kind = _kind(replay)
    if kind == RECORD:
        values, ids = native(scores, topk, num_groups=num_groups, group_topk=group_topk)
        replay.record_indices(ids)
        replay.selections += 1
        return values, ids

    target = _target(replay, kind)
    targets.check(target, replay, scores.shape[1], topk, scores.shape[0])
    ids, repeating = targets.usable(target, replay, scores)
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


def warn_unfused(replay: Any) -> None:
    """Say once that the fused kernel is not used; it takes no expert ids."""
    warn_once(
        "moe_router_fusion: the router of %s runs unfused while it records or replays",
        describe(replay),
    )


def refuse_precomputed(replay: Any) -> None:
    """Raise RouteError: the caller has chosen the experts already."""
    refuse("precomputed expert ids", "a router that selects by top-k", replay)


def note_gating(replay: Any) -> None:
    """Remember on this thread that a router at work computes logits outside of its forward.

    Args:
        replay: its replay object, or None if this router has nothing to do.
    """
    thread = threading.get_ident()
    if replay is not None and running.get(thread) is not replay:
        astray[thread] = replay
    else:
        astray.pop(thread, None)


def refuse_astray() -> None:
    """Raise RouteError if the logits that are selected from now came from such a gating."""
    replay = astray.pop(threading.get_ident(), None)
    if replay is not None:
        refuse(
            "experts are selected outside of TopKRouter.forward (a forward that does not call it, "
            "or parts of the router called one by one) while the router records or replays",
            "a call of the router: elsewhere its ids would be ignored",
            replay,
        )


def opaque(function: _Function) -> _Function:
    """Keep `function` out of torch.compile's graphs, without importing dynamo.

    Its Python state changes from call to call: dynamo would guard on it and recompile each time.
    """
    holder: list[Callable[..., Any]] = [function]

    def disable() -> None:
        holder[0] = sys.modules["torch._dynamo"].disable(function)

    when_imported("torch._dynamo", disable)

    @functools.wraps(function, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        if _is_compiling():
            return holder[0](*args, **kwargs)
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]


# torch < 2.1 has no such function, and no compiled routers either.
_is_compiling = getattr(getattr(torch, "compiler", None), "is_compiling", lambda: False)


# --- which router is running ------------------------------------------------------------------

# Raised by a non-reentrant checkpoint out of the middle of a recompute.
_EARLY_STOP: Any = getattr(torch.utils.checkpoint, "_StopRecomputationError", ())

running: dict[int, Any] = {}
"""Thread -> replay object of the router whose forward runs there, while its action is set.

For the top-k functions of releases that do not pass the replay object on (before 0.16).
"""


astray: dict[int, Any] = {}
"""Thread -> replay object of the router at work whose gating was last, outside of its forward."""


def run(router: Any, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run a router's forward while its replay object has an action; refuse what would ignore it.

    Raises:
        RouteError: this router cannot be replayed, or did not make exactly one selection. Then
            the replay object is what it was before.
    """
    replay = router.router_replay
    _check_before(router, replay, kwargs.get("input", args[0] if args else None))
    thread = threading.get_ident()
    before = {name: getattr(replay, name) for name in ("recorded_topk_idx", "native_rows")}
    selections, queue = replay.selections, list(replay.replay_backward_list)
    outer = running.get(thread)
    running[thread] = replay
    try:
        out = original(router, *args, **kwargs)
        if replay.selections != selections + 1:
            routing = type(router).routing
            refuse(
                f"{type(router).__name__} made {replay.selections - selections} replayable "
                f"selections in one forward (its routing is {routing.__module__}."
                f"{routing.__qualname__})",
                "exactly one: another patch, or a router class we do not know, bypasses the "
                "release's top-k function",
                replay,
            )
        return out
    except BaseException as error:
        if isinstance(error, _EARLY_STOP):
            raise  # all that the checkpoint needed is recomputed: the call is over, and right
        vars(replay).update(before, selections=selections)
        replay.replay_backward_list[:] = queue
        if isinstance(error, NameError) and error.name == "te_general_gemm":
            # 0.13 ... 0.16 bind this name only if Transformer Engine can be imported.
            refuse(str(error), "Transformer Engine, which this release's router needs", replay)
        raise
    finally:
        if outer is None:
            del running[thread]
        else:
            running[thread] = outer


def _check_before(router: Any, replay: Any, hidden: Any) -> None:
    """What can be known before the release's own code runs and counts losses."""
    if router.routing_type in ("sinkhorn", "quantile_balancing"):
        refuse(
            f"moe_router_load_balancing_type={router.routing_type!r}",
            "a router that selects by top-k; that one cannot be recorded or replayed",
            replay,
        )
    kind = _kind(replay)
    if kind == RECORD:
        return
    cuda: Any = torch.cuda
    if cuda.is_initialized() and cuda.is_current_stream_capturing():
        refuse(
            "a CUDA graph is being captured around a replaying router",
            "no graph: it would replay the ids of the capture for ever",
            replay,
        )
    num_tokens = None
    # alltoall_seq (0.12) gathers the rows of all tensor-parallel ranks inside the router.
    if hidden is not None and router.config.moe_token_dispatcher_type != "alltoall_seq":
        num_tokens = hidden.shape[:-1].numel()
    num_experts = router.config.num_moe_experts
    targets.check(_target(replay, kind), replay, num_experts, router.topk, num_tokens)


# --- helpers ----------------------------------------------------------------------------------


def _kind(replay: Any) -> str:
    kind = getattr(replay.router_replay_action, "value", None)
    if kind not in (RECORD, REPLAY_FORWARD, REPLAY_BACKWARD):
        refuse(f"action {replay.router_replay_action!r}", "a RouterReplayAction", replay)
    return str(kind)


def _target(replay: Any, kind: str) -> Any:
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
