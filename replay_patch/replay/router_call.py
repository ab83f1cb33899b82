"""One call of a router that records or replays, from `TopKRouter.forward` to its end."""

import functools
from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint

from replay_patch.refusals import Where, refuse
from replay_patch.replay import padding_rows
from replay_patch.replay.per_thread import PerThread
from replay_patch.replay.selection import ReplayObject

# Raised by a non-reentrant checkpoint out of the middle of a recompute.
_EARLY_STOP: Any = getattr(torch.utils.checkpoint, "_StopRecomputationError", ())

replay_at_work: PerThread[ReplayObject] = PerThread()
"""The replay object, with an action, of the router whose forward runs.
For the top-k functions of releases that do not pass the replay object on (before 0.16)."""

gated_outside_forward: PerThread[ReplayObject] = PerThread()
"""The replay object, with an action, of the router whose gating was last, outside its forward."""


def run(router: Any, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run a TopKRouter's forward (`original`: the release's) while its replay object has an action.
    Raises RouteError if this router cannot be replayed, or did not make exactly one selection.
    After an error the replay object is what it was before."""
    replay: ReplayObject = router.router_replay
    undo = replay.begin_call(router, kwargs.get("input", args[0] if args else None))
    selections = replay.selections
    try:
        with replay_at_work.during(replay):
            uncounted = replay.uncounted_rows
            if uncounted is None:
                result = original(router, *args, **kwargs)
            else:
                call = functools.partial(original, router, *args, **kwargs)
                result = padding_rows.count_for_bias(router, call, lambda _: ~uncounted)
        if replay.selections != selections + 1:
            routing = type(router).routing
            refuse(
                f"{type(router).__name__} made {replay.selections - selections} replayable "
                f"selections in one forward (its routing is {routing.__module__}."
                f"{routing.__qualname__})",
                "exactly one: another patch, or a router class we do not know, bypasses the "
                "release's top-k function",
                Where.of(replay),
            )
        return result
    except BaseException as error:
        if isinstance(error, _EARLY_STOP):
            raise  # all that the checkpoint needed is recomputed: the call is over, and right
        undo()
        replay.selections = selections
        if isinstance(error, NameError) and error.name == "te_general_gemm":
            # 0.13 ... 0.16 bind this name only if Transformer Engine can be imported.
            needed = "Transformer Engine, which this release's router needs"
            refuse(str(error), needed, Where.of(replay))
        raise
    finally:
        replay.end_call()


def note_gating(replay: ReplayObject | None) -> None:
    """Remember that a router with an action computes logits outside of its forward.
    None: this router routes natively."""
    if replay is not None and replay_at_work.get() is not replay:
        gated_outside_forward.put(replay)
    else:
        gated_outside_forward.pop()


def refuse_gated_outside_forward() -> None:
    """Raise RouteError if the logits that are selected from now came from such a gating."""
    replay = gated_outside_forward.pop()
    if replay is not None:
        refuse(
            "experts are selected outside of TopKRouter.forward (a forward that does not call it, "
            "or parts of the router called one by one) while the router records or replays",
            "a call of the router: elsewhere its ids would be ignored",
            Where.of(replay),
        )
