"""Packed sequences (THD), also over context-parallel ranks: routes of each, as if it were alone."""

import pytest
import torch
from helpers import schedules, sessions
from helpers.schedules import LAYERS, ONE_PROCESS, Layout
from helpers.sessions import E, K
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from replay_patch import Routes, TokenLayout, recording, replaying
from replay_patch.matrix import tiny
from replay_patch.matrix.attention import cp_positions
from replay_patch.matrix.ranks import launch

LENGTHS = [7, 4, 10]
PADDED = [8, 4, 12]


def drawn() -> list[Tensor]:
    """Tokens of each sequence."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, tiny.VOCAB_SIZE, (n,), generator=generator) for n in LENGTHS]


def given() -> list[Routes]:
    generator = torch.Generator().manual_seed(1)
    return [
        Routes(torch.rand(n, LAYERS, E, generator=generator).argsort(2)[..., :K], E)
        for n in LENGTHS
    ]


def packed_rank(rank: int, world: int, init_file: str) -> tuple[list[Tensor], int]:
    """(what was recorded of each sequence, rows of router calls that were replayed right)."""
    [model] = schedules.start(
        Layout(cp=world), rank, init_file, torch_attention=True, **sessions.OPTIONS
    )
    layout = TokenLayout.packed(LENGTHS, cp_size=world, cp_rank=rank, align=4)
    sequence, position = cp_positions(PADDED, world, rank)
    ends = torch.tensor([0, *PADDED]).cumsum(0).to(torch.int32)
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=max(PADDED),
        max_seqlen_kv=max(PADDED),
    )
    whole = [
        torch.cat([tokens, tokens.new_zeros(size - len(tokens))])
        for tokens, size in zip(drawn(), PADDED, strict=True)
    ]
    tokens = torch.stack([whole[s][p] for s, p in zip(sequence, position, strict=True)])[None]

    def forward(more: dict[str, Tensor]) -> Tensor:
        return model(tokens, position[None], None, packed_seq_params=params, **more)

    with recording(model) as record:
        forward(record.load(model, layout)).sum().backward()
    right = 0
    with replaying(model) as replay, sessions.noted(sessions.routers_of([model])) as calls:
        forward(replay.load(model, given(), layout)).sum().backward()
    for call in calls:
        for row, (s, p) in enumerate(zip(sequence.tolist(), position.tolist(), strict=True)):
            if p < LENGTHS[s]:
                wanted = given()[s].expert_ids[p, call.layer - 1].long()
                right += int(torch.equal(call.map[row].nonzero().flatten(), wanted.sort().values))
    return [one.expert_ids for one in record.routes()], right


def separate_rank(rank: int, world: int, init_file: str) -> list[Tensor]:
    [model] = schedules.start(
        ONE_PROCESS, rank, init_file, torch_attention=True, **sessions.OPTIONS
    )
    with recording(model) as record:
        for tokens in drawn():
            record.load(model, TokenLayout.padded([len(tokens)], len(tokens)))
            model(tokens[None], torch.arange(len(tokens))[None], None).sum().backward()
    return [one.expert_ids for one in record.routes()]


@pytest.mark.parametrize("world", [1, 2])
def test_packed_sequences_are_recorded_and_replayed_as_if_alone(world: int) -> None:
    [alone] = launch(separate_rank, 1)

    ranks = launch(packed_rank, world)

    for recorded, _ in ranks:
        for ids, expected in zip(recorded, alone, strict=True):
            assert torch.equal(ids, expected)
    assert sum(right for _, right in ranks) == LAYERS * sum(LENGTHS)
