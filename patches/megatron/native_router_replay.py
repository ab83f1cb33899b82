"""Megatron's own `RouterReplay` (0.16 on), brought to 0.19's surface, with its faults mended."""

from collections.abc import Callable
from typing import Any

from replay_patch.patches.megatron import router_replay_module
from replay_patch.patching import Patch, Transaction, probe

_MODULE = "megatron.core.transformer.moe.router_replay"
_CLASS = f"{_MODULE}:RouterReplay"


def _needed() -> tuple[bool, str]:
    if probe.find(_CLASS) is None or router_replay_module.provided():
        return False, "this release has no RouterReplay of its own"
    return True, "this release has its own RouterReplay, without checks"


def _apply(transaction: Transaction) -> None:
    from replay_patch.replay import router_replay
    from replay_patch.replay.action_replay import ActionReplay

    native = probe.find(_CLASS)
    ours = vars(ActionReplay) | vars(router_replay.RouterReplay)
    own = dict(vars(native))
    for name, value in ours.items():
        if name not in own and not name.startswith("__"):  # 0.16 lacks the static buffers
            transaction.set(native, name, value)
    for name in ("static_buffer", "layer_number"):  # set by __init__ in later releases only
        transaction.set(native, name, None)
    if "set_static_buffer" not in own:
        transaction.set(native, "record_indices", ours["record_indices"])

    for name, make in _wrappers(router_replay).items():
        transaction.wrap(native, name, make)


def _wrappers(router_replay: Any) -> dict[str, Callable[[Any], Any]]:
    """Method name -> what makes, of the installed method, one that checks first."""
    from replay_patch.replay import selection

    def checked(check: Callable[..., None]) -> Callable[[Any], Any]:
        def make(original: Any) -> Any:
            def method(*args: Any, **kwargs: Any) -> None:
                check(*args, *kwargs.values())  # none takes more than one argument beside self
                original(*args, **kwargs)

            return method

        return make

    def get_replay_topk(original: Any) -> Any:
        def method(
            self: Any,
            scores: Any,
            topk: int,
            num_groups: int | None = None,
            group_topk: int | None = None,
            default_compute_topk: Any = None,
        ) -> Any:
            selection.check_native(self, default_compute_topk)
            if self.router_replay_action is None:
                return original(self, scores, topk, num_groups, group_topk, default_compute_topk)
            return selection.ask(self, scores, topk, num_groups, group_topk, default_compute_topk)

        return method

    def clear_indices(original: Any) -> Any:
        def method(self: Any) -> None:
            original(self)
            router_replay.after_clearing(self)

        return method

    def clear_global_indices(original: Any) -> Any:
        def method() -> None:
            router_replay.clear_all()

        return method

    return {
        "get_replay_topk": get_replay_topk,
        "set_target_indices": checked(router_replay.check_target),
        "set_router_replay_action": checked(router_replay.check_action),
        "set_global_router_replay_action": checked(router_replay.check_global_action),
        "set_replay_data": checked(router_replay.check_replay_data),
        "set_global_static_buffers": checked(router_replay.check_static_buffers),
        "clear_indices": clear_indices,
        "clear_global_indices": clear_global_indices,
        "record_indices": checked(router_replay.check_buffer),
    }


PATCH = Patch(
    name="native_router_replay",
    library="megatron",
    targets=(_CLASS,),
    modules=(_MODULE, "megatron.core.transformer.moe.router"),
    requires="megatron.core.transformer.moe.router",
    after=("router_replay_module",),
    relies_on=tuple(
        f"{_CLASS}.{name}"
        for name in (
            *("__init__", "get_replay_topk", "record_indices", "clear_indices"),
            *("set_target_indices", "set_router_replay_action", "set_global_router_replay_action"),
            *("set_replay_data", "set_global_static_buffers", "clear_global_indices"),
        )
    ),
    checks=("replay-api",),
    why=(
        "It crashes untyped without a target, accepts a wrong number of rows or columns silently "
        "(tokens without any expert), takes int64 ids only, and sends a row that repeats an "
        "expert on with fewer assignments than the dispatcher counts. 0.16 lacks the static "
        "buffers and the layer number."
    ),
    how=(
        "Its methods are wrapped, the class is kept. For valid ids the result is bitwise its own. "
        "A method that only later releases have is added."
    ),
    upstream="none known: 0.19.2 still takes ids without looking at them",
    remove_when="the release checks ids itself",
    needed=_needed,
    apply=_apply,
    vital=True,
)
