"""Microbatches of all kinds, and where their tokens are, in plain Python."""

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from replay_patch import TokenLayout
from replay_patch.routes.expert_ids import ids_dtype
from replay_patch.routes.padding import fill_padding


@dataclass(frozen=True)
class Case:
    """A microbatch, its cut over ranks, and what it should look like. -1 is padding."""

    lengths: list[int]
    sizes: list[int]  # padded lengths
    sequences: list[list[int]]  # of token numbers, padded
    packed: bool
    cut: dict[str, Any]
    arguments: dict[str, Any]  # of `TokenLayout.padded` or `.packed`

    def make(self) -> TokenLayout:
        kind = TokenLayout.packed if self.packed else TokenLayout.padded
        return kind(self.lengths, **self.arguments, **self.cut)

    def on(self, cp_rank: int, tp_rank: int = 0) -> "Case":
        return dataclasses.replace(self, cut=self.cut | {"cp_rank": cp_rank, "tp_rank": tp_rank})

    def ranks(self) -> "list[Case]":
        """This case on each context-parallel rank."""
        return [self.on(rank, self.cut["tp_rank"]) for rank in range(self.cut["cp_size"])]

    @property
    def inputs(self) -> list[list[int]]:
        """The model input of the rank."""
        cp = self.cut["cp_size"], self.cut["cp_rank"], self.cut["cp_layout"]
        if not self.packed:
            return [_chunk_of(sequence, *cp) for sequence in self.sequences]
        if self.cut["cp_layout"] == "zigzag":
            return [_joined(_chunk_of(sequence, *cp) for sequence in self.sequences)]
        return [_chunk_of(_joined(self.sequences), *cp)]

    @property
    def rows(self) -> list[int]:
        """The router rows of the rank."""
        inputs = self.inputs
        positions = list(range(len(inputs[0])))
        if self.cut["sequence_parallel"]:
            step = len(positions) // self.cut["tp_size"]
            positions = positions[self.cut["tp_rank"] * step : (self.cut["tp_rank"] + 1) * step]
        return [sequence[at] for at in positions for sequence in inputs]


@st.composite
def padded(draw: Any) -> Case:
    lengths, cut = draw(_lengths), draw(_cuts())
    align = draw(st.sampled_from([None, 2]))
    align = align and align * _default_align(cut)
    side = draw(st.sampled_from(["left", "right"]))
    max_length = max(lengths) + draw(st.integers(0, 4))
    size = _up(max_length, align or _default_align(cut))
    sequences = []
    for tokens in _numbered(lengths):
        padding = [-1] * (size - len(tokens))
        sequences.append(tokens + padding if side == "right" else padding + tokens)
    arguments = {"max_length": max_length, "padding_side": side, "align": align}
    return Case(lengths, [size] * len(lengths), sequences, False, cut, arguments)


@st.composite
def packed(draw: Any) -> Case:
    lengths, cut = draw(_lengths), draw(_cuts())
    least = _default_align(cut)
    align = draw(st.sampled_from([None, 2 * least]))
    total_align = draw(st.sampled_from([None, 4 * least]))
    sizes = [_up(length, align or least) for length in lengths]
    total = _up(sum(sizes), total_align or 1)
    pad_to = draw(st.sampled_from([None, total, total + 4 * least]))
    sizes[-1] += (pad_to or total) - sum(sizes)
    sequences = [
        tokens + [-1] * (size - len(tokens))
        for tokens, size in zip(_numbered(lengths), sizes, strict=True)
    ]
    arguments = {"align": align, "total_align": total_align, "pad_to": pad_to}
    return Case(lengths, sizes, sequences, True, cut, arguments)


cases = st.one_of(padded(), packed())


def _numbered(lengths: list[int]) -> list[list[int]]:
    tokens = itertools.count()
    return [[next(tokens) for _ in range(length)] for length in lengths]


_lengths = st.lists(st.integers(0, 9), min_size=1, max_size=5)


@st.composite
def _cuts(draw: Any) -> dict[str, Any]:
    tp_size, cp_size = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return {
        "tp_size": tp_size,
        "tp_rank": draw(st.integers(0, tp_size - 1)),
        "sequence_parallel": draw(st.booleans()),
        "cp_size": cp_size,
        "cp_rank": draw(st.integers(0, cp_size - 1)),
        "cp_layout": draw(st.sampled_from(["zigzag", "contiguous"])),
    }


def _default_align(cut: dict[str, Any]) -> int:
    zigzag = cut["cp_layout"] == "zigzag" and cut["cp_size"] > 1
    return int(cut["tp_size"] * (2 * cut["cp_size"] if zigzag else cut["cp_size"]))


def _chunk_of(positions: list[int], size: int, rank: int, layout: str) -> list[int]:
    """What context parallelism leaves of some positions on one rank."""
    pieces = 2 * size if layout == "zigzag" and size > 1 else size
    step = len(positions) // pieces
    cut = [positions[i * step : (i + 1) * step] for i in range(pieces)]
    return cut[rank] + (cut[-1 - rank] if pieces > size else [])


def _joined(sequences: Any) -> list[int]:
    return list(itertools.chain.from_iterable(sequences))


def _up(number: int, multiple: int) -> int:
    return next(n for n in itertools.count(number) if n % multiple == 0)


def padding_ids(
    num_layers: int, num_rows: int, topk: int, num_experts: int, ep_size: int = 1, first: int = 0
) -> Tensor:
    """[L, P, K]: the experts that P rows of padding get, where nothing else is there."""
    ids = torch.empty(num_layers, num_rows, topk, dtype=ids_dtype(num_experts))
    fill_padding(ids, torch.arange(num_rows), num_experts, ep_size, first)
    return ids
