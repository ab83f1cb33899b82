"""Which router is running: it is known from `TopKRouter.forward` to the top-k function.

A *replay object* is what `replay_patch.replay.selection` says.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint

from replay_patch.refusals import refuse
from replay_patch.replay import padding_rows, target_ids
from replay_patch.replay.selection import RECORD, SESSION, kind_of, target_of

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
    in_session = replay.router_replay_action is SESSION
    if in_session:
        undo = replay.begin()
    else:
        undo = _begin(router, replay, kwargs.get("input", args[0] if args else None))
    selections = replay.selections
    thread = threading.get_ident()
    outer = running.get(thread)
    running[thread] = replay
    try:
        given = None
        if in_session:
            _check_shape(replay, kwargs.get("input", args[0] if args else None))
            given = replay.microbatch.replayed
        if given is None:
            out = original(router, *args, **kwargs)
        else:
            call = functools.partial(original, router, *args, **kwargs)
            out = padding_rows.counted(router, call, lambda _: ~given)
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
        undo()
        replay.selections = selections
        if isinstance(error, NameError) and error.name == "te_general_gemm":
            # 0.13 ... 0.16 bind this name only if Transformer Engine can be imported.
            refuse(str(error), "Transformer Engine, which this release's router needs", replay)
        raise
    finally:
        if in_session:
            replay.microbatch = None
        if outer is None:
            del running[thread]
        else:
            running[thread] = outer


def _check_shape(replay: Any, hidden: Any) -> None:
    """Refuse hidden states [S, B, H] that the layout of the microbatch is not for."""
    shape: Any = getattr(hidden, "shape", ())
    if len(shape) == 3 and shape[:2] != replay.microbatch.shape:
        refuse(
            f"hidden states of {shape[0]} positions x {shape[1]} sequences",
            "{} x {}, as the layout says (sequence and context parallelism included)".format(
                *replay.microbatch.shape
            ),
            replay,
        )


def _begin(router: Any, replay: Any, hidden: Any) -> Callable[[], None]:
    """Check what can be known before the release's own code runs and counts losses.

    Returns:
        What takes back the call's traces if it fails.
    """
    check_selecting(router, replay)
    kind = kind_of(replay)
    if kind != RECORD:
        check_capture(replay)
        num_tokens = None
        # alltoall_seq (0.12) gathers the rows of all tensor-parallel ranks inside the router.
        if hidden is not None and router.config.moe_token_dispatcher_type != "alltoall_seq":
            num_tokens = hidden.shape[:-1].numel()
        experts = router.config.num_moe_experts
        target_ids.check(target_of(replay, kind), replay, experts, router.topk, num_tokens)
    before = {name: getattr(replay, name) for name in ("recorded_topk_idx", "native_rows")}
    queue = list(replay.replay_backward_list)

    def undo() -> None:
        vars(replay).update(before)
        replay.replay_backward_list[:] = queue

    return undo


def check_selecting(router: Any, where: Any) -> None:
    """Raise RouteError for a router that does not select by top-k.

    Args:
        where: has its layer number, for the message.
    """
    if router.routing_type in ("sinkhorn", "quantile_balancing"):
        refuse(
            f"moe_router_load_balancing_type={router.routing_type!r}",
            "a router that selects by top-k; that one cannot be recorded or replayed",
            where,
        )


def check_capture(where: Any = None) -> None:
    """Raise RouteError while a graph is being captured, on a GPU or an NPU."""
    # torch_npu's transfer_to_npu puts into torch.cuda what torch.npu has. What an older torch.npu
    # lacks stays torch.cuda's own, which raises in a torch without CUDA.
    backends: Any = torch.backends
    cuda = torch.cuda if backends.cuda.is_built() else None
    accelerators: Any = (cuda, getattr(torch, "npu", None))
    for accelerator in accelerators:
        capturing = getattr(accelerator, "is_current_stream_capturing", None)
        if capturing is not None and accelerator.is_initialized() and capturing():
            refuse(
                "a CUDA or NPU graph is being captured around a replaying router",
                "no graph: it would replay the ids of the capture for ever",
                where,
            )


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
