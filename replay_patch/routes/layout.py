"""`TokenLayout`: where the tokens of one microbatch are, in the model input and in router rows.

B sequences, S positions, T packed positions. Host integers in, host tensors out; made in time
linear in the number of tokens, whatever layers and top-k there are.
"""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from replay_patch.errors import LayoutError
from replay_patch.routes.checking import integer


@dataclass(frozen=True, eq=False, repr=False)
class TokenLayout:
    """One microbatch on one rank. Make it with `padded` or `packed`.

    A token is named by its place in the *concatenated real tokens*: all of sequence 0, then all of
    sequence 1, and so on, without any padding. -1 is padding.

    Attributes:
        lengths: real tokens of each (sub-)sequence.
        padded_lengths: what each sequence takes in the model input, before any cut.
        rows: int64 [R], the token in each router row of this rank. Megatron's router sees
            [S, B, hidden] as rows s * B + b. Cut for this context-parallel rank, and with sequence
            parallelism for this tensor-parallel rank.
        input_rows: int64 [B, S] or [1, T], the token at each position of this rank's model input.
            Cut for this context-parallel rank, and never for sequence parallelism.
    """

    lengths: tuple[int, ...]
    padded_lengths: tuple[int, ...]
    rows: Tensor
    input_rows: Tensor
    uncut: Tensor
    """int64 [B, S] or [1, T]: `input_rows` without context parallelism."""
    cut: "Cut"

    @classmethod
    def padded(
        cls,
        lengths: Iterable[int],
        max_length: int,
        *,
        padding_side: str = "right",
        tp_size: int = 1,
        tp_rank: int = 0,
        sequence_parallel: bool = False,
        cp_size: int = 1,
        cp_rank: int = 0,
        cp_layout: str = "zigzag",
        align: int | None = None,
    ) -> "TokenLayout":
        """One sequence for each row of the model input, [B, S].

        Args:
            lengths: host integers, one for each sequence.
            max_length: S, before it is rounded up to a multiple of `align`.
            padding_side: "right", or "left": then the tokens end at S.
            sequence_parallel: whether router rows are cut over `tp_size`.
            cp_layout: "zigzag" (of 2 * cp_size chunks, a rank has one from each end) or
                "contiguous".
            align: default tp_size * (2 * cp_size if zigzag and cp_size > 1 else cp_size).

        Raises:
            LayoutError: a sequence longer than S, or an S that cannot be cut as asked.
        """
        cut = Cut(tp_size, tp_rank, sequence_parallel, cp_size, cp_rank, cp_layout)
        given = _lengths(lengths)
        size = _round_up(_integer("max_length", max_length, 0), _align(align, cut))
        if padding_side not in ("left", "right"):
            raise LayoutError(f"padding_side={padding_side!r}: expected 'left' or 'right'")
        uncut = torch.full((len(given), size), -1, dtype=torch.int64)
        token = 0
        for place, length in enumerate(given):
            if length > size:
                raise LayoutError(
                    f"sequence {place} has {length} tokens: expected at most {size}, the padded "
                    f"length; max_length={max_length} is too small"
                )
            at = 0 if padding_side == "right" else size - length
            uncut[place, at : at + length] = torch.arange(token, token + length)
            token += length
        return cls._made(given, (size,) * len(given), uncut, cut, [size])

    @classmethod
    def packed(
        cls,
        lengths: Iterable[int],
        *,
        tp_size: int = 1,
        tp_rank: int = 0,
        sequence_parallel: bool = False,
        cp_size: int = 1,
        cp_rank: int = 0,
        cp_layout: str = "zigzag",
        align: int | None = None,
        total_align: int | None = None,
        pad_to: int | None = None,
    ) -> "TokenLayout":
        """All sequences in one row, [1, T]: seq0, pad0, seq1, pad1, ... (thd).

        Args:
            lengths: host integers, one for each (sub-)sequence.
            sequence_parallel: whether router rows are cut over `tp_size`.
            cp_layout: "zigzag" cuts each padded sequence by itself (2 * cp_size chunks, a rank has
                one from each end); "contiguous" cuts the packed row as a whole.
            align: of each sequence's padded length; default tp_size * (2 * cp_size if zigzag and
                cp_size > 1 else cp_size).
            total_align: T is rounded up to a multiple of it.
            pad_to: T. What it and `total_align` add belongs to the last sequence's padding.

        Raises:
            LayoutError: more tokens than `pad_to`, or lengths that cannot be cut as asked.
        """
        cut = Cut(tp_size, tp_rank, sequence_parallel, cp_size, cp_rank, cp_layout)
        given = _lengths(lengths)
        sizes = [_round_up(length, _align(align, cut)) for length in given]
        total = sum(sizes)
        if total_align is not None:
            total = _round_up(total, _integer("total_align", total_align, 1))
        if pad_to is not None:
            wanted = _integer("pad_to", pad_to, 0)
            if wanted < total or (total_align is not None and wanted % total_align):
                raise LayoutError(
                    f"pad_to={wanted}: expected at least the {total} positions of the padded "
                    "sequences"
                    + (f", and a multiple of total_align={total_align}" if total_align else "")
                )
            total = wanted
        added = total - sum(sizes)
        if sizes:
            sizes[-1] += added
        uncut = torch.full((1, total), -1, dtype=torch.int64)
        token = at = 0
        for length, size in zip(given, sizes, strict=True):
            uncut[0, at : at + length] = torch.arange(token, token + length)
            token, at = token + length, at + size
        segments = (sizes or [total]) if cut.cp_layout == "zigzag" else [total]
        return cls._made(given, tuple(sizes), uncut, cut, segments)

    @classmethod
    def _made(
        cls,
        lengths: tuple[int, ...],
        padded_lengths: tuple[int, ...],
        uncut: Tensor,
        cut: "Cut",
        segments: Sequence[int],
    ) -> "TokenLayout":
        input_rows = uncut.index_select(1, cut.positions(segments))
        return cls(lengths, padded_lengths, cut.rows(input_rows), input_rows, uncut, cut)

    @property
    def num_tokens(self) -> int:
        """Real tokens of the microbatch, on all ranks together."""
        return sum(self.lengths)

    @functools.cached_property
    def padding_mask(self) -> Tensor:
        """bool, shaped like `input_rows`; True = padding. Never cut for sequence parallelism."""
        return self.input_rows == -1

    def __repr__(self) -> str:
        return (
            f"<TokenLayout of {self.num_tokens} tokens in {len(self.lengths)} sequences, input "
            f"{list(self.input_rows.shape)}, {len(self.rows)} router rows, {self.cut}>"
        )


@dataclass(frozen=True)
class Cut:
    """How a microbatch is divided over ranks, and which of them this is."""

    tp_size: int = 1
    tp_rank: int = 0
    sequence_parallel: bool = False
    cp_size: int = 1
    cp_rank: int = 0
    cp_layout: str = "zigzag"

    def __post_init__(self) -> None:
        for kind, size, rank in (
            ("tp", self.tp_size, self.tp_rank),
            ("cp", self.cp_size, self.cp_rank),
        ):
            if _integer(f"{kind}_rank", rank, 0) >= _integer(f"{kind}_size", size, 1):
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

    def positions(self, segments: Sequence[int]) -> Tensor:
        """int64: the positions of this context-parallel rank, each segment cut by itself."""
        mine = []
        start = 0
        for place, size in enumerate(segments):
            if size % self.chunks:
                raise LayoutError(
                    f"padded length {size} (segment {place}): expected a multiple of {self.chunks} "
                    f"for cp_size={self.cp_size}, {self.cp_layout}; align must be a multiple of it"
                )
            step = size // self.chunks
            chunks = {self.cp_rank}
            if self.chunks > self.cp_size:
                chunks.add(self.chunks - 1 - self.cp_rank)
            for chunk in sorted(chunks):
                mine.append(torch.arange(start + chunk * step, start + (chunk + 1) * step))
            start += size
        return torch.cat(mine) if mine else torch.arange(0)

    def rows(self, input_rows: Tensor) -> Tensor:
        """Router rows of this rank, from its model input: sequence first, then cut for SP."""
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


def _align(given: int | None, cut: Cut) -> int:
    return cut.tp_size * cut.chunks if given is None else _integer("align", given, 1)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _lengths(given: Any) -> tuple[int, ...]:
    if isinstance(given, Tensor):
        if given.device.type != "cpu":
            raise LayoutError(
                f"lengths is on {given.device}: expected host integers, as a layout never waits "
                "for a device; take them before the batch is moved"
            )
        given = given.tolist()
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise LayoutError(f"lengths={given!r}: expected one integer for each sequence")
    return tuple(_integer(f"lengths[{i}]", length, 0) for i, length in enumerate(given))


def _integer(what: str, given: Any, least: int) -> int:
    return integer(what, given, least, LayoutError)
