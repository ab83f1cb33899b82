"""Padding masks in whole schedules: as the batch without its rows of padding, on the same ranks.

The runs of a layout differ in the sequence length only: `REAL` tokens, or these and padding, which
is distributed unevenly over sequence- and context-parallel ranks. So each rank's gradients and
counts have to be the same, but for those that are sums over ranks.
"""

import importlib.util
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import schedules
from helpers.schedules import WIDTH, Layout
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from replay_patch import TokenLayout, recording
from replay_patch.matrix import tiny
from replay_patch.matrix.attention import cp_positions
from replay_patch.matrix.ranks import launch

TOTAL, E, K, MICROBATCHES = 8, 8, 2, 2
BIAS = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
GLOBAL = ["global_aux_loss"] if hasattr(TopKRouter, "_apply_global_aux_loss") else []
NATIVE = "padding_mask" in inspect.signature(inspect.unwrap(GPTModel.forward)).parameters
FIELDS = TransformerConfig.__dataclass_fields__


def losses(kind: str) -> dict[str, Any]:
    return {"moe_router_load_balancing_type": kind, "moe_aux_loss_coeff": 0.2}


def microbatch(number: int, total: int, real: int) -> tuple[Tensor, Tensor]:
    """(tokens, mask), each [B, total], the same on all ranks; padding is token 0."""
    generator = torch.Generator().manual_seed(number)
    shape = (WIDTH, TOTAL)
    tokens = torch.randint(1, tiny.VOCAB_SIZE, shape, generator=generator)[:, :total]
    mask = torch.arange(total).expand(WIDTH, total) >= real
    return tokens.masked_fill(mask, 0), mask


def train(where: Layout, chunks: list[Any], total: int, real: int, how: str) -> dict[str, Tensor]:
    """One step; what each router has counted and its gradient, summed over tensor-parallel ranks.

    Args:
        how: the mask comes from "no one", from the "caller" (whole on each stage) or a "session".
    """
    here = cp_positions([total], where.cp, parallel_state.get_context_parallel_rank())[1]
    rank = parallel_state.get_tensor_model_parallel_rank()
    layout = TokenLayout.padded(
        [real] * WIDTH,
        total,
        tp_size=where.tp,
        tp_rank=rank,
        sequence_parallel=where.tp > 1,
        cp_size=where.cp,
        cp_rank=parallel_state.get_context_parallel_rank(),
    )
    session = recording(chunks) if how == "session" else None

    def forward_step(
        numbers: Iterator[int], chunk: Any, return_schedule_plan: bool = False
    ) -> tuple[Any, Any]:
        tokens, mask = (t[:, here] for t in microbatch(next(numbers), total, real))
        more = {"padding_mask": mask} if how == "caller" else {}
        if session is not None:
            more = session.load(chunk, layout)

        def loss_of(found: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            loss = (found * ~mask).sum() / (WIDTH * real)
            return loss, {"loss": loss.detach()}

        call = chunk.build_schedule_plan if return_schedule_plan else chunk
        positions = here.expand(WIDTH, -1)
        return call(tokens, positions, None, labels=tokens, **more), loss_of

    def run() -> None:
        schedules.run_schedule(
            chunks, range(MICROBATCHES), forward_step_func=forward_step, seq_length=total
        )

    if session is None:
        run()
    else:
        with session:
            run()
    return kept(where, chunks)


def kept(where: Layout, chunks: list[Any]) -> dict[str, Tensor]:
    out = {f"gradient of {n}": g for n, g in schedules.router_gradients(chunks).items()}
    for chunk in chunks:
        for layer in chunk.decoder.layers:
            counts = layer.mlp.router.local_tokens_per_expert
            if where.tp > 1:
                dist.all_reduce(counts, group=parallel_state.get_tensor_model_parallel_group())
            out[f"counts of layer {layer.layer_number}"] = counts
    if where.cp > 1:
        for value in out.values():
            dist.all_reduce(value, group=parallel_state.get_context_parallel_group())
    return out


def ranks(
    rank: int, world: int, init_file: str, where: Layout, runs: list[tuple[int, dict[str, Any]]]
) -> list[str]:
    """What is wrong on this rank, in words.

    Args:
        runs: the number of real tokens, and what differs in the config.
    """
    tiny.init(where.world, rank, init_file, **where.sizes)
    wrong = []
    for real, options in runs:
        found = {}
        steps = {"nothing": real, "caller": TOTAL, "session": TOTAL}
        if options is runs[0][1]:
            steps["no one"] = TOTAL
        for how, total in steps.items():
            tiny.clear_aux_tracker()
            torch.manual_seed(1)
            chunks = schedules.build(where, **GIVEN | options)
            found[how] = train(where, chunks, total, real, how)
        expected = found.pop("nothing")
        for how, values in found.items():
            far = [
                name
                for name, value in values.items()
                if not (expected[name] - value).norm() <= 1e-5 * expected[name].norm()
            ]
            if how == "no one" and len(far) < len(values) / 2:
                wrong.append(f"{options}: padding changes nothing here but {far}")
            elif how != "no one" and far:
                wrong.append(f"{options}, mask from {how}: other {', '.join(far)}")
    return wrong


GIVEN = {
    "num_layers": 2,
    "num_moe_experts": E,
    "moe_router_topk": K,
    "enable_routing_replay": False,
} | BIAS
Z = {"moe_z_loss_coeff": 0.3}  # a mean over each rank's own rows, so not with uneven ranks
AUX, SEQ = losses("aux_loss"), losses("seq_aux_loss")
MODES = [
    pytest.param(Layout(pp=2), [(6, AUX | Z), (6, SEQ | FULL)], id="pp2"),
    pytest.param(Layout(pp=2, vpp=2), [(6, AUX | Z | {"num_layers": 4})], id="vpp2"),
    pytest.param(  # the last: one rank has padding only
        Layout(tp=2),
        [(6, AUX), (6, SEQ), *((6, losses(k)) for k in GLOBAL), (4, AUX | FULL)],
        id="tp2",
    ),
    pytest.param(Layout(cp=2), [(4, AUX), (4, SEQ)], id="cp2"),
    pytest.param(Layout(tp=2, pp=2), [(6, AUX | FULL)], id="tp2pp2"),
]


@pytest.mark.parametrize("where, runs", MODES)
def test_a_step_is_that_of_the_batch_without_padding(
    where: Layout, runs: list[tuple[int, dict[str, Any]]]
) -> None:
    for wrong in launch(ranks, where.world, (where, runs)):
        assert wrong == []


GATHERS = importlib.util.find_spec("megatron.core.transformer.moe.legacy_a2a_token_dispatcher")


@pytest.mark.skipif(GATHERS is None, reason="0.12 only")
def test_a_router_that_gathers_its_rows() -> None:
    """alltoall_seq: z-loss sees this rank's rows, the rest those of all ranks."""
    options = AUX | {"moe_token_dispatcher_type": "alltoall_seq"}

    for wrong in launch(ranks, 2, (Layout(tp=2), [(6, options)])):
        assert wrong == []


OVERLAP = {"unchecked": {"overlap_moe_expert_parallel_comm": True}}


@pytest.mark.skipif(
    "overlap_moe_expert_parallel_comm" not in FIELDS or NATIVE,
    reason="no combined 1F1B before 0.14; from 0.16 on Megatron's own drops the mask",
)
def test_combined_1f1b() -> None:
    for wrong in launch(ranks, 2, (Layout(ep=2), [(6, AUX | OVERLAP)])):
        assert wrong == []
