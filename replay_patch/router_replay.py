"""`RouterReplay` and `RouterReplayAction` for the Megatron releases that have none (before 0.16).

The surface and behaviour of Megatron-core 0.19's
`megatron.core.transformer.moe.router_replay`, so that code written for it runs unchanged; with
typed errors in place of its crashes, and with the checks of `replay_patch.selection`. On releases
that have the module, `patches/native_router_replay.py` brings the class there to the same point.
"""

import importlib
import sys
from collections.abc import Callable
from enum import Enum
from typing import Any

from torch import Tensor

from replay_patch import selection
from replay_patch.errors import RouteError

MODULE = "megatron.core.transformer.moe.router_replay"
"""Where callers import the two classes from, on every release."""


class RouterReplayAction(Enum):
    """What a router does with its expert ids."""

    RECORD = "record"
    REPLAY_FORWARD = "replay_forward"
    REPLAY_BACKWARD = "replay_backward"


class RouterReplay:
    """The recorded and the wanted expert ids of one router.

    Attributes:
        target_topk_idx: int [tokens, topk], what REPLAY_FORWARD uses.
        replay_backward_list: the targets in the order they were set; REPLAY_BACKWARD (a recompute
            in the backward pass) takes the oldest away.
        recorded_topk_idx: int64 [tokens, topk], what RECORD saw last.
        static_buffer: int [max_tokens, topk] or None; if set, RECORD copies into it.
        layer_number: Megatron's, from 1; `mtp_depth`: 0 in the decoder, else the place of the
            block in `mtp.layers`, from 1.
        native_rows: rows of host targets that routed natively because they repeat an expert.
    """

    global_router_replay_instances: list["RouterReplay"] = []  # noqa: RUF012 - as in Megatron
    """Plain list in build order; an entry leaves it when its router dies."""

    # What our checks need to know; set where the router is built.
    mtp_depth: int = 0
    num_experts: int | None = None
    topk: int | None = None
    graphed: str | None = None
    native_rows: int = 0
    selections: int = 0
    invalid_ids: Tensor | None = None

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

        Raises:
            RouteError: wrong number of tensors (it names the routers), or a bad one.
        """
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
        clear_all(instances(), lambda entry: entry.clear_indices())

    @staticmethod
    def set_global_router_replay_action(router_replay_action: RouterReplayAction) -> None:
        """`set_router_replay_action` of every router."""
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

        Raises:
            RouteError: they cannot be right for this router; nothing is changed.
        """
        check_target(self, topk_indices)
        self.target_topk_idx = topk_indices
        self.replay_backward_list.append(topk_indices)

    def get_recorded_indices(self) -> Tensor | None:
        """What RECORD saw last."""
        return self.recorded_topk_idx

    def clear_indices(self) -> None:
        """Forget recorded and target ids.

        Raises:
            RouteError: ids on a device turned out to be out of range; after all is cleared.
        """
        self.recorded_topk_idx = None
        self.target_topk_idx = None
        self.replay_backward_list = []
        selection.raise_deferred(self)

    def set_router_replay_action(self, router_replay_action: RouterReplayAction) -> None:
        """Record or replay from the next forward on.

        Raises:
            RouteError: not a RouterReplayAction, or the router is inside a CUDA graph.
        """
        check_action(self, router_replay_action)
        self.router_replay_action = router_replay_action

    def clear_router_replay_action(self) -> None:
        """Route natively."""
        self.router_replay_action = None

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(values, ids) of the final selection, each [tokens, topk]; see `selection.choose`."""
        if default_compute_topk is None:
            raise RouteError("get_replay_topk() needs default_compute_topk, the native selection")
        if self.router_replay_action is None:
            return default_compute_topk(scores, topk, num_groups, group_topk)
        return choose(self, scores, topk, num_groups, group_topk, default_compute_topk)

    def set_static_buffer(self, buffer: Tensor) -> None:
        """Record into `buffer` [max_tokens, topk] from now on."""
        self.static_buffer = buffer

    def clear_static_buffer(self) -> None:
        """Record into fresh tensors again."""
        self.static_buffer = None

    def record_indices(self, topk_indices: Tensor) -> None:
        """Keep what was selected: the tensor, or its copy in the static buffer.

        Raises:
            RouteError: the static buffer is too small.
        """
        if self.static_buffer is None:
            self.recorded_topk_idx = topk_indices
            return
        check_buffer(self, topk_indices)
        rows = self.static_buffer[: topk_indices.shape[0]]
        rows.copy_(topk_indices)
        self.recorded_topk_idx = rows


choose = selection.opaque(selection.choose)


def instances() -> list[Any]:
    """The list of the class that callers import: Megatron's own where it has one."""
    live = getattr(sys.modules.get(MODULE), "RouterReplay", RouterReplay)
    return live.global_router_replay_instances


def new() -> Any:
    """A replay object of the class that callers import, listed last."""
    module = importlib.import_module(MODULE)
    return module.RouterReplay()


# --- checks, shared with the patch of Megatron's own class ---


def check_target(replay: Any, ids: Any) -> None:
    """Raise RouteError for ids that cannot be right for this router, whatever the microbatch."""
    selection.check_ids(ids, replay, replay.num_experts, replay.topk)


def check_replay_data(all_layers_topk_indices: list[Any]) -> None:
    """Raise RouteError unless there is one fitting tensor per router of `instances()`."""
    entries = instances()
    if len(all_layers_topk_indices) != len(entries):
        names = [selection.describe(entry) for entry in entries]
        orphans = sorted({n for i, n in enumerate(names) if "?" in n or n in names[:i]})
        raise RouteError(
            f"{len(all_layers_topk_indices)} tensors of expert ids for {len(names)} routers: "
            f"{', '.join(names) or 'none was built with replay on'}. Built twice, or never given "
            f"a layer number: {', '.join(orphans) or 'none'}. Give one tensor per router in this "
            "order, or address routers by their router_replay.layer_number and mtp_depth"
        )
    for entry, ids in zip(entries, all_layers_topk_indices, strict=True):
        check_target(entry, ids)


def check_action(replay: Any, action: Any) -> None:
    """Raise RouteError for an action that would be ignored."""
    value = getattr(action, "value", None) if isinstance(action, Enum) else None
    if action is not None and value not in {a.value for a in RouterReplayAction}:
        raise RouteError(
            f"router of {selection.describe(replay)}: action is {action!r}; expected a "
            "RouterReplayAction"
        )
    if replay.graphed and value not in (None, RouterReplayAction.RECORD.value):
        raise RouteError(
            f"router of {selection.describe(replay)}: it runs inside a CUDA graph "
            f"({replay.graphed}), which would replay the expert ids of its capture for ever; "
            "exclude the MoE router from the graph, or switch graphs off"
        )


def check_static_buffers(static_buffer: Tensor) -> None:
    """Raise RouteError unless there is one slice per router."""
    if static_buffer.dim() != 3 or static_buffer.shape[1] != len(instances()):
        raise RouteError(
            f"static buffer has shape {tuple(static_buffer.shape)}; expected "
            f"[max_tokens, {len(instances())} routers, topk]"
        )


def check_buffer(replay: Any, ids: Tensor) -> None:
    """Raise RouteError if the static buffer cannot hold `ids`."""
    room = replay.static_buffer.shape
    if ids.shape[0] > room[0] or ids.shape[1] != room[1]:
        raise RouteError(
            f"router of {selection.describe(replay)}: the static buffer has room for "
            f"{tuple(room)} ids; expected at least {tuple(ids.shape)}"
        )


def clear_all(entries: list[Any], clear: Callable[[Any], None]) -> None:
    """Clear every entry; then raise the first error, so that one bad layer leaves nothing set."""
    first: RouteError | None = None
    for entry in entries:
        try:
            clear(entry)
        except RouteError as error:
            first = first or error
    if first is not None:
        raise first
