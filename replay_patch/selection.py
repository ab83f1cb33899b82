"""The one place where expert ids are chosen: the replayed ones, or the native ones.

A *replay object* here is a `RouterReplay`, Megatron's own (0.16 on, with our patch on it) or ours
(`replay_patch.router_replay`, before that). T tokens, E experts, K top-k.
"""

import functools
import logging
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from replay_patch import activation
from replay_patch.errors import RouteError
from replay_patch.hooks import when_imported
from replay_patch.probe import Probe

_log = logging.getLogger(__name__)
_Function = TypeVar("_Function", bound=Callable[..., Any])

# uint16/32/64 are accepted: they widen to int64, although torch has few other kernels for them.
_INTEGERS = frozenset(
    {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
    | {d for n in ("uint16", "uint32", "uint64") if (d := getattr(torch, n, None)) is not None}
)
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
    kind = replay.router_replay_action.value
    if kind == RECORD:
        values, ids = native(scores, topk, num_groups=num_groups, group_topk=group_topk)
        replay.record_indices(ids)
        replay.selections += 1
        return values, ids

    target = _target(replay, kind)
    num_tokens, num_experts = scores.shape
    ids = check_ids(target, replay, num_experts, topk, num_tokens).to(scores.device)
    unusable = _duplicates(replay, ids) if topk > 1 else None
    if unusable is not None:
        # Zero-filled padding: K copies of one expert would break the count of assignments.
        picked = native(scores, topk, num_groups=num_groups, group_topk=group_topk)[1]
        ids = torch.where(unusable.unsqueeze(1), picked, ids)
        if kind == REPLAY_FORWARD:
            _freeze(replay, target, ids)
    if kind == REPLAY_BACKWARD:
        replay.replay_backward_list.pop(0)
    replay.selections += 1
    return scores.gather(1, ids), ids


def check_ids(
    ids: Any, replay: Any, num_experts: int | None, topk: int | None, num_tokens: int | None = None
) -> Tensor:
    """Validate replay targets [T, K] as far as the arguments that are not None allow.

    Host tensors are checked at once. Ids on a device are not looked at, which would wait for it:
    they are clamped into range, and whether that changed any is kept in `replay.invalid_ids` and
    raised when the indices are cleared (`raise_deferred`).

    Returns:
        The ids as int64, on their own device.

    Raises:
        RouteError: it names release, layer, what was found and what was expected.
    """
    if not isinstance(ids, Tensor):
        _refuse(replay, f"targets are {type(ids).__name__}", "a torch.Tensor [tokens, topk]")
    if ids.dtype not in _INTEGERS:
        _refuse(replay, f"target dtype is {ids.dtype}", "an integer dtype")
    if ids.dim() != 2:
        _refuse(replay, f"target shape is {tuple(ids.shape)}", "[tokens, topk]")
    if topk is not None and ids.shape[1] != topk:
        _refuse(replay, f"{ids.shape[1]} experts per token", f"topk={topk}")
    if num_tokens is not None and ids.shape[0] != num_tokens:
        _refuse(replay, f"{ids.shape[0]} target rows", f"{num_tokens}, one per token of this call")
    wide: Tensor = ids.to(torch.int64)
    if num_experts is None or not wide.numel():
        return wide
    if _on_host(wide):
        low, high = (int(v) for v in torch.aminmax(wide))
        if low < 0 or high >= num_experts:
            row = int(((wide < 0) | (wide >= num_experts)).any(dim=1).nonzero()[0])
            _refuse(
                replay,
                f"row {row} has expert ids {wide[row].tolist()}",
                f"ids in 0..{num_experts - 1} (rows that were not captured cannot be marked "
                "with -1 here: give them equal ids, and they route natively)",
            )
        return wide
    in_range = wide.clamp(0, num_experts - 1)
    _defer(replay, (in_range != wide).any())
    return in_range


def raise_deferred(replay: Any) -> None:
    """Read what `check_ids` found on the device since the last time; waits for the device.

    Raises:
        RouteError: some ids were out of range (with STRICT: or some row had equal ids).
    """
    flag, replay.invalid_ids = replay.invalid_ids, None
    if flag is not None and bool(flag):
        _refuse(
            replay,
            "expert ids on the device were out of range (or, under REPLAY_PATCH_STRICT, repeated "
            "in a row) in a step that has run since the indices were last cleared",
            "distinct ids in 0..num_experts-1; the step's result is not to be used",
        )


def warn_unfused(replay: Any) -> None:
    """Say once that the fused kernel is not used; it takes no expert ids."""
    warn_once(
        "moe_router_fusion: the router of %s runs unfused while it records or replays",
        describe(replay),
    )


def refuse_precomputed(replay: Any) -> None:
    """Raise RouteError: the caller has chosen the experts already."""
    _refuse(replay, "precomputed expert ids", "a router that selects by top-k")


def warn_once(message: str, *args: Any) -> None:
    """Log a warning the first time that this message is given in this process."""
    if message not in _warned:
        _warned.add(message)
        _log.warning(message, *args)


_warned: set[str] = set()


def describe(replay: Any) -> str:
    """`layer 3` or `layer 1 of MTP block 2`, as errors name a router."""
    number = "?" if replay.layer_number is None else replay.layer_number
    return f"layer {number}" + (f" of MTP block {replay.mtp_depth}" if replay.mtp_depth else "")


def opaque(function: _Function) -> _Function:
    """Keep `function` out of torch.compile's graphs, without importing dynamo.

    Its Python state changes from call to call: dynamo would guard on it and recompile each time.
    """
    holder: list[Callable[..., Any]] = [function]

    def disable() -> None:
        import sys

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

running: dict[int, Any] = {}
"""Thread -> replay object of the router whose forward runs there, while its action is set.

For the top-k functions of releases that do not pass the replay object on (before 0.16).
"""


def run(router: Any, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run a router's forward while its replay object has an action; refuse what would ignore it.

    Raises:
        RouteError: this router cannot be replayed, or did not make exactly one selection.
    """
    replay = router.router_replay
    _refuse_unsupported(router, replay)
    thread, before = threading.get_ident(), replay.selections
    outer = running.get(thread)
    running[thread] = replay
    try:
        out = original(router, *args, **kwargs)
    finally:
        if outer is None:
            del running[thread]
        else:
            running[thread] = outer
    made = replay.selections - before
    if made != 1:
        replay.selections = before
        routing = type(router).routing
        _refuse(
            replay,
            f"{type(router).__name__} made {made} replayable selections in one forward (its "
            f"routing is {routing.__module__}.{routing.__qualname__})",
            "exactly one: another patch, or a router class we do not know, bypasses the release's "
            "top-k function",
        )
    return out


def _refuse_unsupported(router: Any, replay: Any) -> None:
    if router.routing_type in ("sinkhorn", "quantile_balancing"):
        _refuse(
            replay,
            f"moe_router_load_balancing_type={router.routing_type!r}",
            "a router that selects by top-k; that one cannot be recorded or replayed",
        )
    cuda: Any = torch.cuda
    capturing = cuda.is_initialized() and cuda.is_current_stream_capturing()
    if capturing and replay.router_replay_action.value != RECORD:
        _refuse(
            replay,
            "a CUDA graph is being captured around a replaying router",
            "no graph: it would replay the ids of the capture for ever",
        )


# --- helpers ----------------------------------------------------------------------------------


def _target(replay: Any, kind: str) -> Any:
    if kind == REPLAY_FORWARD:
        if replay.target_topk_idx is None:
            _refuse(
                replay,
                f"{kind} (selection {replay.selections} of this router) with no target",
                "set_target_indices() before the forward; natively routed layers need no action",
            )
        return replay.target_topk_idx
    if kind != REPLAY_BACKWARD:
        _refuse(replay, f"action {replay.router_replay_action!r}", "a RouterReplayAction")
    if not replay.replay_backward_list:
        _refuse(
            replay,
            f"{kind} (selection {replay.selections} of this router) with no target left: every "
            "microbatch that was set has been replayed",
            "one set_target_indices() per microbatch that is recomputed",
        )
    return replay.replay_backward_list[0]


def _duplicates(replay: Any, ids: Tensor) -> Tensor | None:
    """[T] bool: rows with an expert twice; None if it is known that there is none."""
    ordered = ids.sort(dim=1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]).any(dim=1)
    if not _on_host(twice):
        if activation.strict():
            _defer(replay, twice.any())
        return twice
    count = int(twice.sum())
    if not count:
        return None
    if activation.strict():
        row = int(twice.nonzero()[0])
        _refuse(
            replay, f"row {row} has expert ids {ids[row].tolist()}", "distinct ids in every row"
        )
    replay.native_rows += count
    warn_once(
        "%s: %d of %d rows of expert ids repeat an expert (zero-filled padding?); such rows "
        "route natively (REPLAY_PATCH_STRICT=1 makes this an error)",
        describe(replay),
        count,
        len(ids),
    )
    return twice


def _on_host(tensor: Tensor) -> bool:
    """Whether looking at the values waits for no device."""
    return tensor.device.type == "cpu"


def _freeze(replay: Any, target: Tensor, ids: Tensor) -> None:
    """Let the recompute of this microbatch see the natively picked rows of this forward."""
    queue = replay.replay_backward_list
    for i, waiting in enumerate(queue):
        if waiting is target:
            queue[i] = ids.to(target.dtype)


def _defer(replay: Any, flag: Tensor) -> None:
    replay.invalid_ids = flag if replay.invalid_ids is None else replay.invalid_ids | flag


def _refuse(replay: Any, found: str, expected: str) -> None:
    raise RouteError(
        f"{Probe().megatron()}, router of {describe(replay)}: {found}; expected {expected}"
    )
