"""What one `load()` hands to the routers of one chunk, made on the host before the forward.

N tokens of the microbatch, R router rows of this rank, L MoE layers of a chunk, E experts, K top-k.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from replay_patch.errors import LayoutError, RouteError
from replay_patch.megatron.parallel_ranks import ParallelRanks, gathers_rows
from replay_patch.routes import RouteBatch, Routes, TokenLayout
from replay_patch.routes.device_copies import to_device
from replay_patch.routes.expert_ids import ids_dtype

if TYPE_CHECKING:
    from replay_patch.sessions.session import Stage


@dataclass
class Microbatch:
    """The expert ids of one microbatch, compact. Its tensors are on the device.

    Attributes:
        num_rows: R.
        shape: (S, B) of the hidden states that a router gets; their product need not be R.
        dtype: of the ids.
        ids: [R, K] for each MoE layer of the chunk; None: the router's first forward chooses them.
        holes: bool [R, 1], rows that route natively; None: there are none.
        captured: bool [R, 1]; None: the overlap with native routes is not sampled.
        counts: rows that are captured, holes, padding.
        uncounted: bool [R, 1], rows that the expert bias does not count because their experts are
            given; None: it counts all.
    """

    num_rows: int
    shape: tuple[int, int]
    dtype: torch.dtype
    ids: list[Tensor | None]
    holes: Tensor | None = None
    captured: Tensor | None = None
    counts: tuple[int, int, int] = (0, 0, 0)
    uncounted: Tensor | None = None


def router_rows(layout: Any, config: Any) -> Tensor:
    """int64 [R]: the token in each row that the routers of this model see; -1 is padding.
    Raises LayoutError for what is no TokenLayout."""
    if not isinstance(layout, TokenLayout):
        raise LayoutError(f"layout is a {type(layout).__name__}: expected a TokenLayout")
    return layout.input_rows.t().flatten() if gathers_rows(config) else layout.rows


def hidden_shape(layout: TokenLayout, config: Any) -> tuple[int, int]:
    """(S, B) of a router's input. Layouts of other shapes can have as many rows."""
    batch, length = layout.input_rows.shape
    return length // ParallelRanks.of(config).sequence_parts, batch


def microbatch_to_record(
    layout: TokenLayout, num_rows: int, num_layers: int, config: Any
) -> Microbatch:
    """A microbatch of R rows on this rank, whose routers, one for each of the chunk's MoE layers,
    choose for themselves."""
    shape = hidden_shape(layout, config)
    return Microbatch(num_rows, shape, ids_dtype(config.num_moe_experts), [None] * num_layers)


def microbatch_to_replay(
    routes: Any,
    layout: TokenLayout,
    stage: "Stage",
    moe_layers: Sequence[int],
    first_padding: int,
    sampled: bool,
    count_replayed: bool,
) -> tuple[Microbatch, int]:
    """A microbatch that takes these routes, and where the experts of the next padding begin.

    Args:
        routes: one per sequence of the layout.
        layout: of the microbatch on this rank.
        stage: the chunk that it is loaded for.
        moe_layers: those of the whole model.
        first_padding: choices made for padding so far.
        sampled: whether the overlap with native routes is to be measured.
        count_replayed: whether the expert bias counts tokens whose experts are given.
    Raises:
        RouteError: routes that do not fit the sequences or the model.
    """
    if isinstance(routes, Routes):
        raise RouteError("routes is one Routes: expected a list, one for each sequence")
    if not isinstance(routes, Iterable):
        raise RouteError(
            f"routes is {routes!r}: expected a list of Routes, one for each sequence; have they "
            "been lost on the way from the rollout?"
        )
    batch = routes if isinstance(routes, RouteBatch) else RouteBatch(routes)
    config = stage.config
    expected = config.num_moe_experts, config.moe_router_topk
    if len(batch) and (batch[0].num_experts, batch[0].topk) != expected:  # the others are alike
        raise RouteError(
            f"trajectory 0 has routes of {batch[0].num_experts} experts, top-k {batch[0].topk}: "
            f"the model has {expected[0]} experts, top-k {expected[1]}"
        )
    rows = batch.to_rows(
        layout,
        stage.layers,
        moe_layers,
        config.num_layers,
        rows=router_rows(layout, config),
        ep_size=config.expert_model_parallel_size,
        first_padding=first_padding,
    )
    kinds = (rows.captured, rows.holes, rows.padding)
    captured, holes, padding = (int(np.count_nonzero(kind.numpy())) for kind in kinds)

    def column(kind: Tensor) -> Tensor:
        return to_device(kind.unsqueeze(1), stage.device)

    microbatch = Microbatch(
        num_rows=len(rows.captured),
        shape=hidden_shape(layout, config),
        dtype=rows.expert_ids.dtype,
        ids=list(to_device(rows.expert_ids, stage.device).unbind(0)),
        holes=column(rows.holes) if holes else None,
        captured=column(rows.captured) if sampled and captured else None,
        counts=(captured, holes, padding),
        uncounted=None if count_replayed else column(~rows.holes),
    )
    return microbatch, rows.next_padding


# --- a layout against the rank and the pipeline stage that it is loaded on ------------------------


def check_rank(layout: Any, config: Any) -> None:
    """Raise LayoutError for a layout that is cut for other ranks than this one and its config: the
    right number of rows would hide it. What has no cut, or is no layout, is left to later checks.
    """
    cut = getattr(layout, "cut", None)
    if cut is None:
        return
    ranks = ParallelRanks.of(config)
    expected = {"cp_size": ranks.cp_size, "cp_rank": ranks.cp_rank}
    if cut.sequence_parallel and cut.tp_size > 1:
        expected |= {"tp_size": ranks.tp_size, "tp_rank": ranks.tp_rank}
    found = {name: getattr(cut, name) for name in expected}
    if found != expected:
        raise LayoutError(f"the layout is for {found}: this rank and its config are {expected}")


def mask_of_stage(chunk: Any, config: Any, device: torch.device, layout: Any) -> Tensor:
    """The padding mask in the shape that this stage takes, on its device.

    The first stage takes [B, S] and scatters it itself over sequence-parallel ranks; a later one
    takes this rank's part of S, as its hidden states are: LayoutError if S cannot be cut so.
    """
    mask: Tensor = layout.padding_mask
    ranks = ParallelRanks.of(config)
    if ranks.sequence_parts > 1 and not getattr(chunk, "pre_process", True):
        if mask.shape[1] % ranks.sequence_parts:
            raise LayoutError(
                f"{mask.shape[1]} positions: expected a multiple of {ranks.sequence_parts} for "
                "sequence parallelism"
            )
        mask = ranks.own_part(mask, dim=1).contiguous()
    return to_device(mask, device)
