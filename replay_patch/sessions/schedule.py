"""`recording(model)` and `replaying(model)`: expert ids through one Megatron schedule.

    with replaying(model) as replay:
        forward_backward_func(...)      # its forward_step calls replay.load(chunk, routes, layout)

Each block spans one `forward_backward_func` call, training or forward-only, on one rank. A load
hands over one microbatch, just before its forward; which microbatch a recompute belongs to is asked
of autograd (`replay_patch.replay.recompute`), so schedules may run backwards in any order.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from replay_patch.megatron.layer_placement import moe_layers
from replay_patch.megatron.parallel_ranks import ParallelRanks
from replay_patch.routes import RouteBatch, Routes, TokenLayout
from replay_patch.sessions import gather
from replay_patch.sessions.microbatch import (
    Microbatch,
    microbatch_to_record,
    microbatch_to_replay,
    router_rows,
)
from replay_patch.sessions.report import Report
from replay_patch.sessions.session import Session

OVERLAP_EVERY = 8
"""One in this many microbatches is compared with native routing."""


def recording(model: Any) -> "Recording":
    """Record what the routers of a model choose during one schedule.

    Args:
        model: a module, or the list of its virtual pipeline chunks; wrapped (DDP, Float16Module)
            or not.
    Raises:
        PatchNotActive: a patch that replay stands on is not in place.
        RouteError: on entering: the model is in a session already, or its routers cannot be
            recorded. On leaving: a loaded microbatch was not used by every router.
    """
    return Recording(model)


def replaying(
    model: Any, *, overlap_every: int = OVERLAP_EVERY, count_replayed: bool = True
) -> "Replaying":
    """Make the routers of a model take given experts during one schedule.

    Args:
        model: as in `recording`.
        overlap_every: measure the overlap with native routing in one of that many microbatches;
            0 for none.
        count_replayed: whether the counts from which Megatron updates the expert bias hold the
            given experts, which the bias did not choose. False: those of native rows only.
    Raises:
        PatchNotActive, RouteError: as `recording`.
    """
    return Replaying(model, overlap_every, count_replayed)


class Recording(Session):
    """The routes that the routers chose, in first forwards; a recompute uses them again."""

    name = "recording"

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._loads: list[tuple[tuple[int, ...], Tensor]] = []  # lengths and router rows
        self._microbatches: dict[int, list[Microbatch]] = {}  # of each chunk, while in the block
        self._record: gather.RankRecord | None = None

    def load(self, chunk: Any, layout: TokenLayout) -> dict[str, Any]:
        """Begin one microbatch of one chunk.

        Args:
            chunk: as `forward_step` got it.
            layout: of the microbatch on this rank.
        Returns:
            Keyword arguments for the model call: `padding_mask`, or none.
        Raises:
            RouteError: not in the block, inside a backward, or another microbatch than the same
                load of another chunk.
            LayoutError: a layout for another rank.
        """
        stage = self._load(chunk, layout)
        rows, number = router_rows(layout, stage.config), len(stage.seen)
        if number == len(self._loads):
            self._loads.append((tuple(layout.lengths), rows))
        elif tuple(layout.lengths) != self._loads[number][0]:
            self._refuse(
                f"load {number} of this chunk has sequences of {tuple(layout.lengths)} tokens, of "
                f"another chunk {self._loads[number][0]}",
                "the k-th load of every chunk to be the same microbatch",
            )
        microbatch = microbatch_to_record(layout, len(rows), len(stage.layers), stage.config)
        arguments = self._loaded(stage, microbatch, layout)
        self._microbatches.setdefault(id(stage), []).append(microbatch)
        return arguments

    def routes(self) -> list[Routes]:
        """The routes of all sequences of this replica, in load order, in all MoE layers by number.

        Call it after the block. Collective over the tensor-parallel, context-parallel and pipeline
        ranks, each of which gets all of it; not over data- and expert-parallel ones.

        Raises:
            RouteError: the block is not over or was left by an exception, the ranks did not load
                the same sequences, or a token was in no rank's layout.
        """
        if self._record is None:
            self._refuse(
                f"routes() of a session that is {self._state}", "routes() after a complete block"
            )
        return gather.routes(self._record)

    def _finish(self) -> None:
        ids = {
            layer: [microbatch.ids[index] for microbatch in self._microbatches.get(id(stage), [])]
            for stage in self._stages
            for index, layer in enumerate(stage.layers)
        }
        first = self._stages[0]
        self._record = gather.RankRecord(
            self._loads,
            ids,  # type: ignore[arg-type] # checked: every router has had its first forward
            first.config.num_moe_experts,
            first.config.moe_router_topk,
            first.device,
        )

    def _drop(self) -> None:
        self._microbatches = {}


class Replaying(Session):
    """Given routes, taken by the routers; `report` says how far."""

    name = "replaying"
    report: Report

    def __init__(self, model: Any, overlap_every: int, count_replayed: bool = True) -> None:
        super().__init__(model)
        self.report = Report()
        self._overlap_every = overlap_every
        self._count_replayed = count_replayed
        self._padding: int | None = None  # choices made for padding, so that the next go on

    def load(
        self, chunk: Any, routes: RouteBatch | Sequence[Routes], layout: TokenLayout
    ) -> dict[str, Any]:
        """Begin one microbatch of one chunk.

        Args:
            chunk: as `forward_step` got it.
            routes: one per sequence of the layout, of N or N - 1 rows for N tokens.
            layout: of the microbatch on this rank.
        Returns:
            Keyword arguments for the model call: `padding_mask`, or none.
        Raises:
            RouteError: routes that do not fit sequences, layers or experts; not in the block;
                inside a backward.
            LayoutError: a layout for another rank.
        """
        stage = self._load(chunk, layout)
        if self._padding is None:
            data_rank = ParallelRanks.of(stage.config).data_rank
            self._padding = data_rank * stage.config.moe_router_topk
        microbatch, self._padding = microbatch_to_replay(
            routes,
            layout,
            stage,
            moe_layers(stage.config),
            self._padding,
            bool(self._overlap_every and len(stage.seen) % self._overlap_every == 0),
            self._count_replayed,
        )
        return self._loaded(stage, microbatch, layout)
