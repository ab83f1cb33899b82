"""How a microbatch is divided over tensor-parallel and context-parallel ranks."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from replay_patch.errors import LayoutError
from replay_patch.routes.arguments import integer


@dataclass(frozen=True)
class Cut:
    """The sizes of the groups, and which rank this is. A LayoutError for a rank outside its group,
    or a `cp_layout` that is not known."""

    tp_size: int = 1
    tp_rank: int = 0
    sequence_parallel: bool = False
    cp_size: int = 1
    cp_rank: int = 0
    cp_layout: str = "zigzag"

    def __post_init__(self) -> None:
        groups = ("tp", self.tp_size, self.tp_rank), ("cp", self.cp_size, self.cp_rank)
        for kind, size, rank in groups:
            integer(f"{kind}_rank", rank, 0, LayoutError)
            if rank >= integer(f"{kind}_size", size, 1, LayoutError):
                raise LayoutError(
                    f"{kind}_rank={rank}: expected 0 to {size - 1}, as {kind}_size={size}"
                )
        if self.cp_layout not in ("zigzag", "contiguous"):
            raise LayoutError(
                f"cp_layout={self.cp_layout!r}: expected 'zigzag' or 'contiguous'; how tokens are "
                "cut over context-parallel ranks must be known"
            )

    @property
    def chunks(self) -> int:
        """Into how many equal chunks context parallelism cuts."""
        zigzag = self.cp_layout == "zigzag" and self.cp_size > 1
        return 2 * self.cp_size if zigzag else self.cp_size

    def positions(self, segments: Sequence[int], cp_rank: int | None = None) -> Tensor:
        """int64: the positions that a context-parallel rank (None: this one) has of segments of
        these sizes, each cut by itself; a LayoutError if one cannot be cut equally."""
        rank = self.cp_rank if cp_rank is None else cp_rank
        positions = []
        start = 0
        for index, size in enumerate(segments):
            if size % self.chunks:
                raise LayoutError(
                    f"padded length {size} (segment {index}): expected a multiple of {self.chunks} "
                    f"for cp_size={self.cp_size}, {self.cp_layout}; align must be a multiple of it"
                )
            length = size // self.chunks
            opposite = self.chunks - 1 - rank if self.chunks > self.cp_size else rank  # zigzag
            for chunk in sorted({rank, opposite}):
                positions.append(torch.arange(start + chunk * length, start + (chunk + 1) * length))
            start += size
        return torch.cat(positions) if positions else torch.arange(0)

    def rows(self, input_rows: Tensor) -> Tensor:
        """Router rows of this rank, from its model input: sequence first, then cut for SP. A
        LayoutError if the ranks cannot share the positions equally."""
        if not self.sequence_parallel:
            return input_rows.t().flatten()
        size = input_rows.shape[1]
        if size % self.tp_size:
            raise LayoutError(
                f"{size} positions on a rank: expected a multiple of tp_size={self.tp_size} for "
                "sequence parallelism; align must be a multiple of it"
            )
        part = size // self.tp_size
        return input_rows.narrow(1, self.tp_rank * part, part).t().flatten()
