"""`TokenLayout`: where the tokens of one microbatch are, in the model input and in router rows.
B sequences, S positions, T packed positions. Host integers in, host tensors out; made in time
linear in the number of tokens, whatever layers and top-k there are."""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from replay_patch.errors import LayoutError
from replay_patch.routes.arguments import check_word, integer, lengths_of_sequences
from replay_patch.routes.parallel_cut import Cut
from replay_patch.routes.row_index import RowIndex, dense_shape, inverse


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
    segments: tuple[int, ...]
    """Sizes of the parts of S or T that context parallelism cuts one by one."""
    cut: Cut

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
        """One sequence for each row of the model input, [B, S]. A LayoutError for a sequence longer
        than S, or an S that cannot be cut as asked.

        Args:
            lengths: host integers, one for each sequence.
            max_length: S, before it is rounded up to a multiple of `align`.
            padding_side: "right", or "left": then the tokens end at S.
            sequence_parallel: whether router rows are cut over `tp_size`.
            cp_layout: "zigzag" (of 2 * cp_size chunks, a rank has one from each end) or
                "contiguous".
            align: default tp_size * (2 * cp_size if zigzag and cp_size > 1 else cp_size).
        """
        cut = Cut(tp_size, tp_rank, sequence_parallel, cp_size, cp_rank, cp_layout)
        counts = _host_lengths(lengths)
        size = _round_up(integer("max_length", max_length, 0, LayoutError), _multiple(align, cut))
        check_word("padding_side", padding_side, "left", "right", error=LayoutError)
        uncut = torch.full((len(counts), size), -1, dtype=torch.int64)
        token = 0
        for sequence, length in enumerate(counts):
            if length > size:
                raise LayoutError(
                    f"sequence {sequence} has {length} tokens: expected at most {size}, the padded "
                    f"length; max_length={max_length} is too small"
                )
            first = 0 if padding_side == "right" else size - length
            uncut[sequence, first : first + length] = torch.arange(token, token + length)
            token += length
        return cls._of(counts, [size] * len(counts), uncut, cut, size)

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
        """All sequences in one row, [1, T]: seq0, pad0, seq1, pad1, ... (thd). A LayoutError for
        more tokens than `pad_to`, or lengths that cannot be cut as asked.

        Args:
            lengths: host integers, one for each (sub-)sequence.
            sequence_parallel: whether router rows are cut over `tp_size`.
            cp_layout: "zigzag" cuts each padded sequence by itself (2 * cp_size chunks, a rank has
                one from each end); "contiguous" cuts the packed row as a whole.
            align: of each sequence's padded length; default tp_size * (2 * cp_size if zigzag and
                cp_size > 1 else cp_size).
            total_align: T is rounded up to a multiple of it.
            pad_to: T. What it and `total_align` add belongs to the last sequence's padding.
        """
        cut = Cut(tp_size, tp_rank, sequence_parallel, cp_size, cp_rank, cp_layout)
        counts = _host_lengths(lengths)
        sizes = [_round_up(length, _multiple(align, cut)) for length in counts]
        total = sum(sizes)
        if total_align is not None:
            total = _round_up(total, integer("total_align", total_align, 1, LayoutError))
        if pad_to is not None:
            wanted = integer("pad_to", pad_to, 0, LayoutError)
            if wanted < total or (total_align is not None and wanted % total_align):
                raise LayoutError(
                    f"pad_to={wanted}: expected at least the {total} positions of the padded "
                    "sequences"
                    + (f", and a multiple of total_align={total_align}" if total_align else "")
                )
            total = wanted
        if sizes:
            sizes[-1] += total - sum(sizes)
        uncut = torch.full((1, total), -1, dtype=torch.int64)
        token = first = 0
        for length, size in zip(counts, sizes, strict=True):
            uncut[0, first : first + length] = torch.arange(token, token + length)
            token, first = token + length, first + size
        segments = sizes if sizes and cut.cp_layout == "zigzag" else [total]
        return cls._of(counts, sizes, uncut, cut, *segments)

    @classmethod
    def _of(
        cls, lengths: tuple[int, ...], sizes: Sequence[int], uncut: Tensor, cut: Cut, *segments: int
    ) -> "TokenLayout":
        """The layout of `uncut`, of which `segments` are cut one by one; `sizes` are padded."""
        input_rows = uncut
        if cut.cp_size > 1:
            input_rows = uncut.index_select(1, cut.positions(segments))
        return cls(lengths, tuple(sizes), cut.rows(input_rows), input_rows, uncut, segments, cut)

    @property
    def num_tokens(self) -> int:
        """Real tokens of the microbatch, on all ranks together."""
        return sum(self.lengths)

    @functools.cached_property
    def padding_mask(self) -> Tensor:
        """bool, shaped like `input_rows`; True = padding. Never cut for sequence parallelism."""
        return self.input_rows == -1

    def align(self, values: Any, fill: Any) -> Any:
        """Per-token values where the tokens are in this rank's model input: [B, S, ...] or
        [1, T, ...], with the dtype and the device of `values`.

        Args:
            values: [real tokens, ...], an array, or a tensor on any device; a LayoutError for
                another number of them.
            fill: what padding gets; a LayoutError unless it is a number that the dtype can hold.
        """
        return self._input.take(self._per_token(values), fill)

    def align_rows(self, values: Any, fill: Any) -> Any:
        """Per-token values in the order of this rank's router rows, [R, ...]; see `align`."""
        return self._router.take(self._per_token(values), fill)

    def shift_next_token(self, values: Any, fill: Any) -> Any:
        """Each position gets the value of the next token of its sequence: labels from tokens. The
        last token of a sequence and padding get the fill. Result and errors are those of `align`.

        Args:
            values: [real tokens, ...], all of them, as the next token may be on another
                context-parallel rank. Without context parallelism also shaped like the model input;
                if both fit, they are per token.
            fill: as in `align`.
        """
        shape = dense_shape(values)
        per_token = shape[:1] == (self.num_tokens,)
        if not per_token and self.cut.cp_size == 1 and shape[:2] == tuple(self.input_rows.shape):
            values = self.restore(values)
        return self._next.take(self._per_token(values), fill)

    def restore(self, values: Any) -> Any:
        """The way back from `align`: [real tokens, ...], without padding, with the dtype and the
        device of `values`. `values` are shaped like the model input; with context parallelism those
        of all ranks in rank order, [cp_size, B, S, ...] or [cp_size, 1, T, ...]. Another shape is a
        LayoutError."""
        expected = tuple(self.input_rows.shape)
        if self.cut.cp_size > 1:
            expected = (self.cut.cp_size, *expected)
        shape = dense_shape(values)
        if shape[: len(expected)] != expected:
            hint = "; stack what all_gather gives" if self.cut.cp_size > 1 else ""
            raise LayoutError(
                f"values have shape {list(shape)}: expected {list(expected)} + [...], the model "
                f"input of {self.cut.cp_size} context-parallel ranks{hint}"
            )
        return self._back.take(values.reshape(-1, *shape[len(expected) :]))

    def _per_token(self, values: Any) -> Any:
        shape = dense_shape(values)
        if not shape or shape[0] != self.num_tokens:
            raise LayoutError(
                f"values have shape {list(shape)}: expected [{self.num_tokens}, ...], one for each "
                "real token of the microbatch"
            )
        return values

    @functools.cached_property
    def _input(self) -> RowIndex:
        return RowIndex(self.input_rows)

    @functools.cached_property
    def _router(self) -> RowIndex:
        return RowIndex(self.rows)

    @functools.cached_property
    def _next(self) -> RowIndex:
        following = torch.arange(1, self.num_tokens + 2)
        ends = torch.tensor(self.lengths, dtype=torch.int64).cumsum(0)
        following[ends[ends > 0] - 1] = -1
        following[-1] = -1  # of padding, which is -1 itself
        return RowIndex(following[self.input_rows])

    @functools.cached_property
    def _back(self) -> RowIndex:
        ranks = [
            self.uncut.index_select(1, self.cut.positions(self.segments, rank))
            for rank in range(self.cut.cp_size)
        ]
        return RowIndex(inverse(torch.stack(ranks), self.num_tokens))

    def __repr__(self) -> str:
        return (
            f"<TokenLayout of {self.num_tokens} tokens in {len(self.lengths)} sequences, input "
            f"{list(self.input_rows.shape)}, {len(self.rows)} router rows, {self.cut}>"
        )


def _host_lengths(lengths: Any) -> tuple[int, ...]:
    hint = ", as a layout never waits for a device; take them before the batch is moved"
    return lengths_of_sequences("lengths", lengths, LayoutError, hint)


def _multiple(align: int | None, cut: Cut) -> int:
    """What the length of each sequence is rounded up to a multiple of."""
    return cut.tp_size * cut.chunks if align is None else integer("align", align, 1, LayoutError)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
