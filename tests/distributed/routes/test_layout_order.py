"""`TokenLayout` against Megatron's own order, in real models on gloo ranks.

Which token a router row is, is read off the router's input: with the layers made transparent, that
is the token's embedding. That tokens are in the places where attention and rotary embeddings take
them to be is read off the losses: each token has the one of its sequence alone in one process.
"""

import functools
import inspect
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from helpers import schedules
from helpers.schedules import ONE_PROCESS, Layout
from megatron.core import parallel_state, utils
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import multi_token_prediction
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from replay_patch import TokenLayout
from replay_patch.matrix import tiny
from replay_patch.matrix.ranks import launch

LENGTHS = [7, 1, 12, 5]
TOKENS = (
    1
    + torch.randperm(  # distinct; 0 is padding
        tiny.VOCAB_SIZE - 1, generator=torch.Generator().manual_seed(0)
    )[: sum(LENGTHS)]
)
OPTIONS = {"num_layers": 2, "torch_attention": True}
SUMS_REORDERED = 2e-6  # fp32


@dataclass(frozen=True)
class Batch:
    """A way to lay the sequences out."""

    name: str
    packed: bool
    arguments: dict[str, Any] = field(default_factory=dict)
    losses: bool = True  # whether causal attention sees no padding

    def on(self, where: Layout, cp_rank: int, tp_rank: int) -> TokenLayout:
        cut = {
            "tp_size": where.tp,
            "tp_rank": tp_rank,
            "sequence_parallel": where.tp > 1,
            "cp_size": where.cp,
            "cp_rank": cp_rank,
        }
        if self.packed:
            return TokenLayout.packed(LENGTHS, **cut, **self.arguments)
        return TokenLayout.padded(LENGTHS, max(LENGTHS), **cut, **self.arguments)


BATCHES = [
    Batch("packed", True),
    Batch("packed and padded", True, {"align": 8, "total_align": 16, "pad_to": 64}),
    Batch("padded", False),
    Batch("padded left", False, {"padding_side": "left"}, losses=False),
]
PLACES = [ONE_PROCESS, Layout(tp=2), Layout(cp=2), Layout(tp=2, cp=2)]


@dataclass(frozen=True)
class Seen:
    """What one rank saw of one batch."""

    cp_rank: int
    rows: list[Tensor]  # of each router: int64 [R], the token in each row, -1 for padding
    losses: Tensor  # shaped like the model input
    wrong: list[str]  # where Megatron's own functions give something else


@functools.cache
def alone() -> tuple[dict[str, Tensor], Tensor]:
    """(weights, the loss of each token): each sequence by itself."""
    [found] = launch(alone_rank, 1)
    return found


def alone_rank(rank: int, world: int, init_file: str) -> tuple[dict[str, Tensor], Tensor]:
    [model] = schedules.start(ONE_PROCESS, rank, init_file, **OPTIONS)
    losses = []
    for tokens in TOKENS.split(LENGTHS):
        labels = torch.cat([tokens[1:], torch.zeros(1, dtype=torch.int64)])
        positions = torch.arange(len(tokens))
        with torch.no_grad():
            losses.append(model(tokens[None], positions[None], None, labels=labels[None])[0])
    return schedules.weights(model), torch.cat(losses)


@functools.cache
def seen(where: Layout) -> list[list[Seen]]:
    """By rank and batch."""
    return launch(batches_rank, where.world, (where, alone()[0]))


def batches_rank(
    rank: int, world: int, init_file: str, where: Layout, weights: dict[str, Tensor]
) -> list[Seen]:
    [model] = schedules.start(where, rank, init_file, **OPTIONS)
    schedules.load_weights([model], weights)
    cp_rank = parallel_state.get_context_parallel_rank()
    layouts = [
        batch.on(where, cp_rank, parallel_state.get_tensor_model_parallel_rank())
        for batch in BATCHES
    ]
    losses = [forward(model, layout, packed_params(layout)) for layout in layouts]
    table = weights["embedding.word_embeddings.weight"]
    make_transparent(model)
    rows = [router_rows(model, layout, table) for layout in layouts]
    wrong = [differences(layout) for layout in layouts]
    return [Seen(cp_rank, *found) for found in zip(rows, losses, wrong, strict=True)]


def forward(model: Any, layout: TokenLayout, params: Any) -> Tensor:
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    with torch.no_grad():
        losses: Tensor = model(
            layout.align(TOKENS, 0),
            layout.align(positions, 0),
            None,
            labels=layout.shift_next_token(TOKENS, 0),
            packed_seq_params=params,
        )
    return losses


def packed_params(layout: TokenLayout) -> Any:
    """None for a padded input, which has a row for each sequence."""
    if len(layout.input_rows) > 1:
        return None
    ends = torch.tensor([0, *layout.padded_lengths], dtype=torch.int32).cumsum(0).to(torch.int32)
    longest = max(layout.padded_lengths)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        cu_seqlens_q_padded=ends,
        cu_seqlens_kv_padded=ends,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def make_transparent(model: Any) -> None:
    """Attention and experts add nothing, so every layer sees the embeddings."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "linear_proj.weight" in name or "linear_fc2.weight" in name:
                parameter.zero_()


def router_rows(model: Any, layout: TokenLayout, table: Tensor) -> list[Tensor]:
    inputs: list[Tensor] = []
    hooks = [
        module.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
        for module in model.modules()
        if isinstance(module, TopKRouter)
    ]
    forward(model, layout, packed_params(layout))
    for hook in hooks:
        hook.remove()
    names = torch.full((len(table),), -1)
    names[TOKENS] = torch.arange(len(TOKENS))
    alike = torch.nn.functional.normalize(table, dim=1)  # a norm has scaled the inputs
    return [names[(hidden.flatten(0, 1) @ alike.t()).argmax(1)] for hidden in inputs]


def differences(layout: TokenLayout) -> list[str]:
    """Where Megatron's cut of a padded input and its shift by one token give something else."""
    wrong = []
    group = parallel_state.get_context_parallel_group()
    inputs, real = layout.align(TOKENS, 0), ~layout.padding_mask
    if len(layout.input_rows) > 1:
        own = {"tokens": TOKENS[layout.uncut.clamp(min=0)].masked_fill(layout.uncut < 0, 0)}
        if layout.cut.cp_size > 1:
            cut = utils.get_batch_on_this_cp_rank
            options = {"cp_group": group, "is_hybrid_cp": False}
            known = inspect.signature(cut).parameters
            own = cut(own, **{name: options[name] for name in options if name in known})
        if not torch.equal(own["tokens"], inputs):
            wrong.append("get_batch_on_this_cp_rank")
    roll = multi_token_prediction.roll_tensor
    if "packed_seq_params" in inspect.signature(roll).parameters:  # from 0.16 on
        shifted, _ = roll(inputs, dims=1, cp_group=group, packed_seq_params=packed_params(layout))
        if not torch.equal(shifted[real], layout.shift_next_token(TOKENS, 0)[real]):
            wrong.append("roll_tensor")
    return wrong


def each(batches: list[Batch]) -> Any:
    numbers = [pytest.param(BATCHES.index(batch), id=batch.name) for batch in batches]
    return pytest.mark.parametrize("number", numbers)


everywhere = pytest.mark.parametrize(
    "where", PLACES, ids=["one process", "TP2 SP", "CP2", "TP2 SP CP2"]
)


@everywhere
@each(BATCHES)
def test_every_router_row_is_the_token_that_the_layout_says(where: Layout, number: int) -> None:
    for rank, batches in enumerate(seen(where)):
        found = batches[number]
        layout = BATCHES[number].on(where, found.cp_rank, rank % where.tp)
        assert len(found.rows) == OPTIONS["num_layers"]
        for rows in found.rows:
            assert rows.tolist() == layout.rows.tolist()


@everywhere
@each([batch for batch in BATCHES if batch.losses])
def test_every_token_has_the_loss_of_its_sequence_alone(where: Layout, number: int) -> None:
    losses = [ranks[number].losses for ranks in seen(where)[:: where.tp]]  # by context rank

    restored = (
        BATCHES[number].on(where, 0, 0).restore(torch.stack(losses) if where.cp > 1 else losses[0])
    )

    torch.testing.assert_close(restored, alone()[1], rtol=0, atol=SUMS_REORDERED)


@everywhere
@each(BATCHES)
def test_megatron_cuts_and_shifts_alike(where: Layout, number: int) -> None:
    assert [batches[number].wrong for batches in seen(where)] == [[]] * where.world
