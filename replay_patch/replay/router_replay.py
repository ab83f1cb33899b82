"""`RouterReplay` and `RouterReplayAction` for the Megatron releases that have none (before 0.16).

They behave as those of Megatron-core 0.19's `megatron.core.transformer.moe.router_replay`, so that
code written for it runs unchanged; but with typed errors in place of crashes, and the checks of
`replay_patch.replay.target_ids`. Where a release has the module, the patch `native_router_replay`
gives its class the same.
"""

import importlib
import sys
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from replay_patch.errors import RouteError
from replay_patch.patching import activation
from replay_patch.refusals import Where, refuse
from replay_patch.replay import target_ids
from replay_patch.replay.action_replay import ActionReplay
from replay_patch.replay.selection import get_replay_topk

MODULE = "megatron.core.transformer.moe.router_replay"
"""Where callers import the two classes from, on every release."""


class RouterReplayAction(Enum):
    """What a router does with its expert ids."""

    RECORD = "record"
    REPLAY_FORWARD = "replay_forward"
    REPLAY_BACKWARD = "replay_backward"


class RouterReplay(ActionReplay):
    """The recorded and the wanted expert ids of one router.

    Attributes:
        target_topk_idx: int [tokens, topk], what REPLAY_FORWARD uses.
        replay_backward_list: the targets in the order they were set; REPLAY_BACKWARD (a recompute
            in the backward pass) takes the oldest away.
        recorded_topk_idx: int64 [tokens, topk], what RECORD saw last.
        static_buffer: int [max_tokens, topk] or None; if set, RECORD copies into it.
        layer_number: Megatron's, from 1.
        mtp_depth, native_rows: see `ActionReplay`.
    """

    global_router_replay_instances: list["RouterReplay"] = []  # noqa: RUF012 - as in Megatron
    """Plain list in build order; an entry leaves it when its router dies."""

    def __init__(self) -> None:
        self.target_topk_idx: Tensor | None = None
        self.recorded_topk_idx: Tensor | None = None
        self.router_replay_action: RouterReplayAction | None = None
        self.replay_backward_list: list[Tensor] = []
        self.static_buffer: Tensor | None = None
        self.layer_number: int | None = None
        RouterReplay.global_router_replay_instances.append(self)

    # --- all routers ---

    @staticmethod
    def set_replay_data(all_layers_topk_indices: list[Tensor]) -> None:
        """Set the target of every router in build order; of none, if one does not fit.
        Raises RouteError for the wrong number of tensors (it names the routers), or a bad one."""
        check_replay_data(all_layers_topk_indices)
        for entry, ids in zip(instances(), all_layers_topk_indices, strict=True):
            entry.set_target_indices(ids)

    @staticmethod
    def get_recorded_data() -> list[Tensor | None]:
        """What every router recorded last, in build order."""
        return [entry.get_recorded_indices() for entry in instances()]

    @staticmethod
    def clear_global_indices() -> None:
        """`clear_indices` of every router; the first error is raised after all are cleared."""
        clear_all()

    @staticmethod
    def set_global_router_replay_action(router_replay_action: RouterReplayAction) -> None:
        """`set_router_replay_action` of every router; of none, if one refuses."""
        check_global_action(router_replay_action)
        for entry in instances():
            entry.set_router_replay_action(router_replay_action)

    @staticmethod
    def clear_global_router_replay_action() -> None:
        """All routers route natively again."""
        for entry in instances():
            entry.clear_router_replay_action()

    @staticmethod
    def clear_global_router_replay_instances() -> None:
        """Forget all routers."""
        instances().clear()

    @staticmethod
    def set_global_static_buffers(static_buffer: Tensor) -> None:
        """Give each router its view `[:, i, :]` of a buffer [max_tokens, routers, topk]."""
        check_static_buffers(static_buffer)
        for i, entry in enumerate(instances()):
            entry.set_static_buffer(static_buffer[:, i, :])

    @staticmethod
    def clear_global_static_buffers() -> None:
        """Take the buffers away from all routers."""
        for entry in instances():
            entry.clear_static_buffer()

    # --- one router ---

    def set_target_indices(self, topk_indices: Tensor) -> None:
        """Set the ids [tokens, topk] to replay, and queue them for the recompute.
        Raises RouteError, and changes nothing, if they cannot be right for this router."""
        check_target(self, topk_indices)
        self.target_topk_idx = topk_indices
        self.replay_backward_list.append(topk_indices)

    def get_recorded_indices(self) -> Tensor | None:
        """What RECORD saw last."""
        return self.recorded_topk_idx

    def clear_indices(self) -> None:
        """Forget recorded and target ids. Then raise RouteError if ids on a device turned out to be
        out of range."""
        self.recorded_topk_idx = None
        self.target_topk_idx = None
        self.replay_backward_list = []
        after_clearing(self)

    def set_router_replay_action(self, router_replay_action: RouterReplayAction) -> None:
        """Record or replay from the next forward on. Raises RouteError for what is not a
        RouterReplayAction, or if the router is inside a CUDA graph."""
        check_action(self, router_replay_action)
        self.router_replay_action = router_replay_action

    def clear_router_replay_action(self) -> None:
        """Route natively."""
        self.router_replay_action = None

    get_replay_topk = get_replay_topk  # the function, as a method

    def set_static_buffer(self, buffer: Tensor) -> None:
        """Record into `buffer` [max_tokens, topk] from now on."""
        self.static_buffer = buffer

    def clear_static_buffer(self) -> None:
        """Record into fresh tensors again."""
        self.static_buffer = None

    def record_indices(self, topk_indices: Tensor) -> None:
        """Keep what was selected: the tensor, or its copy in the static buffer.
        Raises RouteError if that is too small."""
        check_buffer(self, topk_indices)
        if self.static_buffer is None:
            self.recorded_topk_idx = topk_indices
            return
        rows = self.static_buffer[: topk_indices.shape[0]]
        rows.copy_(topk_indices)
        self.recorded_topk_idx = rows


def instances() -> list[RouterReplay]:
    """The list of the class that callers import: Megatron's own where it has one."""
    live = getattr(sys.modules.get(MODULE), "RouterReplay", RouterReplay)
    entries: list[RouterReplay] = live.global_router_replay_instances
    return entries


def new() -> RouterReplay:
    """A replay object of the class that callers import, listed last."""
    replay: RouterReplay = importlib.import_module(MODULE).RouterReplay()
    return replay


# --- checks, shared with the patch of Megatron's own class; each raises RouteError ---


def check_target(replay: RouterReplay, ids: Any) -> None:
    """Refuse ids that cannot be right for this router, whatever the microbatch."""
    target_ids.forget(ids)
    target_ids.check(ids, replay, replay.num_experts, replay.topk)


def check_replay_data(all_layers_topk_indices: Any) -> None:
    """Refuse anything but one fitting tensor per router of `instances()`."""
    entries, targets = instances(), all_layers_topk_indices
    if not isinstance(targets, (list, tuple)):
        refuse(f"replay data is {type(targets).__name__}", "a list of tensors, one per router")
    if len(targets) != len(entries):
        names = [str(Where.of(entry)) for entry in entries]
        orphans = sorted({n for i, n in enumerate(names) if "?" in n or n in names[:i]})
        refuse(
            f"{len(targets)} tensors of expert ids for {len(names)} routers",
            f"one for each of: {', '.join(names) or 'none, no router has replay on'}. Built twice, "
            f"or never given a layer number: {', '.join(orphans) or 'none'}. Routers can also be "
            "addressed one by one, by router_replay.layer_number and mtp_depth",
        )
    for entry, ids in zip(entries, targets, strict=True):
        check_target(entry, ids)


def check_action(replay: RouterReplay, action: Any) -> None:
    """Refuse an action that would be ignored."""
    if action is None:
        return
    where = Where.of(replay)
    activation.require_replay(f"recording or replaying {where}")
    value = action.value if isinstance(action, Enum) else None
    if value not in {a.value for a in RouterReplayAction}:
        refuse(f"action is {action!r}", "a RouterReplayAction", where)
    if replay.in_session:
        refuse(
            "the router is in a recording() or replaying() block, which would ignore the action",
            "actions before or after the block",
            where,
        )
    if replay.graphed and value != RouterReplayAction.RECORD.value:
        refuse(
            f"the router runs inside a CUDA graph ({replay.graphed}), which would replay the "
            "expert ids of its capture for ever",
            "graphs off, or the MoE router outside of them",
            where,
        )


def check_global_action(action: Any) -> None:
    """Refuse an action that one of the routers refuses."""
    for entry in instances():
        check_action(entry, action)


def check_static_buffers(static_buffer: Any) -> None:
    """Refuse a buffer without one slice per router."""
    if not isinstance(static_buffer, Tensor):
        refuse(f"static buffer is {type(static_buffer).__name__}", "a torch.Tensor")
    if static_buffer.dim() != 3 or static_buffer.shape[1] != len(instances()):
        found = f"static buffer has shape {tuple(static_buffer.shape)}"
        refuse(found, f"[max_tokens, {len(instances())} routers, topk]")


def check_buffer(replay: RouterReplay, ids: Tensor) -> None:
    """Refuse a static buffer that cannot hold `ids`."""
    buffer: Any = replay.static_buffer
    if buffer is None:
        return
    if not isinstance(buffer, Tensor):
        refuse(f"static buffer is {type(buffer).__name__}", "a torch.Tensor", Where.of(replay))
    if buffer.dim() != 2 or len(buffer) < len(ids) or buffer.shape[1] != ids.shape[1]:
        found = f"static buffer has shape {tuple(buffer.shape)}"
        refuse(found, f"at least {tuple(ids.shape)}", Where.of(replay))
    highest = (replay.num_experts or 1) - 1
    if buffer.dtype not in target_ids.INTEGERS or torch.iinfo(buffer.dtype).max < highest:
        found = f"static buffer has dtype {buffer.dtype}"
        refuse(found, "an integer dtype that holds every expert id", Where.of(replay))


def after_clearing(replay: RouterReplay) -> None:
    """Forget what belongs to the targets; raise what was found wrong with them on a device."""
    replay.frozen = ()
    target_ids.raise_deferred(replay)


def clear_all() -> None:
    """Clear every router; then raise the first error, so that one bad layer leaves nothing set."""
    first: RouteError | None = None
    for entry in instances():
        try:
            entry.clear_indices()
        except RouteError as error:
            first = first or error
    if first is not None:
        raise first
