"""Replay inside the top-k function of the releases that have no seam for it (0.12 ... 0.15).

The function is not re-implemented and not copied. While a router records or replays, it runs the
release's own code object with two global names bound differently: `torch`, whose `topk` is ours
once, and `group_limited_topk`. All that follows the final selection (probabilities, scaling,
capacity, dropping, the map) is the release's own; so are the inner top-k calls of group selection,
which run with the real names.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from replay_patch.patching import Patch, Transaction, probe
from replay_patch.patching.rebinding import globals_of, with_globals
from replay_patch.refusals import installed_megatron

if TYPE_CHECKING:
    from replay_patch.replay.per_thread import PerThread
    from replay_patch.replay.selection import ReplayObject

_UTILS = "megatron.core.transformer.moe.moe_utils"
_ROUTER = "megatron.core.transformer.moe.router"
_NAMES = ("topk_softmax_with_capacity", "topk_routing_with_score_function")
"""0.12 and 0.13; from 0.14 on."""


def _needed() -> tuple[bool, str]:
    name = _name()
    if "router_replay" in probe.parameters(f"{_UTILS}:{name}"):
        return False, f"{name} takes router_replay"
    return True, f"{name} takes no router_replay"


def _name() -> str:
    for name in _NAMES:
        if probe.find(f"{_ROUTER}:{name}") is not None:
            return name
    raise LookupError(
        f"{_ROUTER} uses none of {', '.join(_NAMES)}: this is {installed_megatron()}, and "
        "replay-patch supports megatron-core 0.12.0 and later"
    )


def _apply(transaction: Transaction) -> None:
    name = _name()
    original = probe.find(f"{_ROUTER}:{name}")
    with_globals(original, {})  # raises here, and not in the first forward, if it cannot be done
    if not {"torch", "group_limited_topk"} <= inspect.unwrap(original).__globals__.keys():
        raise LookupError(f"{name} of {installed_megatron()} is not the function that we know")
    transaction.set_everywhere(name, original, _wrapped_topk(original))
    transaction.wrap(probe.find(f"{_ROUTER}:Router"), "gating", _wrapped_gating)


def _wrapped_gating(original: Callable[..., Any]) -> Callable[..., Any]:
    """The top-k function knows no router; every way of running one begins with its gating."""
    from replay_patch.patching.compiling import opaque
    from replay_patch.replay import router_call

    note_gating = opaque(router_call.note_gating)
    outside = router_call.gated_outside_forward.by_thread

    def gating(self: Any, *args: Any, **kwargs: Any) -> Any:
        replay = getattr(self, "router_replay", None)
        if replay is not None and replay.router_replay_action is not None:
            note_gating(replay)
        elif outside:
            note_gating(None)
        return original(self, *args, **kwargs)

    return gating


def _wrapped_topk(original: Callable[..., Any]) -> Callable[..., Any]:
    from replay_patch.patching.compiling import opaque
    from replay_patch.replay import router_call, selection
    from replay_patch.replay.per_thread import PerThread

    call_at_work: PerThread[_Call] = PerThread()
    clone: Any = None
    clone_globals: list[Any] = []  # that the clone was made with
    at_work = router_call.replay_at_work.by_thread
    outside = router_call.gated_outside_forward.by_thread

    @opaque
    def select(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal clone, clone_globals
        replay = router_call.replay_at_work.get()
        if replay is None:
            router_call.refuse_gated_outside_forward()
            return original(*args, **kwargs)
        if kwargs.get("fused"):
            selection.warn_unfused(replay)
            kwargs = {**kwargs, "fused": False}
        current = globals_of(original)
        if clone is None or any(a is not b for a, b in zip(current, clone_globals, strict=True)):
            clone, clone_globals = _with_selection(original, call_at_work), current
        with call_at_work.during(_Call(replay)):
            return clone(*args, **kwargs)

    @functools.wraps(original, updated=())
    def topk_function(*args: Any, **kwargs: Any) -> Any:
        if not at_work and not outside:
            return original(*args, **kwargs)
        return select(args, kwargs)

    return topk_function


@dataclass
class _Call:
    """One call of the top-k function: who chooses the experts, and whether it has done so."""

    replay: "ReplayObject"
    answered: bool = False


def _with_selection(original: Any, call_at_work: "PerThread[_Call]") -> Callable[..., Any]:
    """`original`, where a call's replay object answers its first `topk` or `group_limited_topk`."""
    names = inspect.unwrap(original).__globals__
    torch, group_limited_topk = names["torch"], names["group_limited_topk"]

    def current_call() -> _Call:
        call = call_at_work.get()
        assert call is not None  # the clone runs in `select` only
        return call

    class Torch:
        """torch, but for the selection. Capacity uses topk, too, later and along dim 0."""

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        @staticmethod
        def topk(scores: Any, k: int, dim: int = -1, **kwargs: Any) -> Any:
            def native(scores: Any, topk: int, *_: Any, **__: Any) -> Any:
                return torch.topk(scores, k=topk, dim=dim, **kwargs)

            call = current_call()
            if call.answered or dim not in (1, -1) or scores.dim() != 2:
                return native(scores, k)
            call.answered = True
            return call.replay.get_replay_topk(scores, k, None, None, native)

    def grouped(**kwargs: Any) -> Any:
        def native(scores: Any, *_: Any, **__: Any) -> Any:
            return group_limited_topk(**kwargs | {"scores": scores})

        call = current_call()
        call.answered = True
        groups = (kwargs["num_groups"], kwargs["group_topk"])
        return call.replay.get_replay_topk(kwargs["scores"], kwargs["topk"], *groups, native)

    return with_globals(original, {"torch": Torch(), "group_limited_topk": grouped})


PATCH = Patch(
    name="router_topk",
    library="megatron",
    targets=(
        *(f"{module}:{name}" for name in _NAMES for module in (_UTILS, _ROUTER)),
        f"{_ROUTER}:Router.gating",
    ),
    requires=_ROUTER,
    relies_on=(f"{_UTILS}:group_limited_topk", f"{_ROUTER}:TopKRouter.routing"),
    checks=("topk-seam",),
    why="Before 0.16 nothing lets a caller say which experts a router takes.",
    how=(
        "A wrapper of the top-k function, set wherever that function is bound. While the running "
        "router has a replay action it calls the same code with `torch.topk` and "
        "`group_limited_topk` bound so that the first, final selection goes through "
        "`RouterReplay.get_replay_topk`; else the original. `TopKRouter.routing` is not touched, "
        "and capacity, dropping, probabilities and losses stay the release's own. A fused router "
        "runs unfused while it records or replays. `Router.gating` is the original, "
        "and notes a router with a replay action that is run without its forward, which is refused."
    ),
    upstream="Megatron-LM commit db6b895c69 (0.16.0) added the seam",
    remove_when="0.15 is no longer supported",
    needed=_needed,
    apply=_apply,
    vital=True,
)
