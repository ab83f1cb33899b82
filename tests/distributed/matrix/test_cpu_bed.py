"""The CPU bed computes what it should: every layout gives the numbers of one process.

The plugin is on and its routers have replay objects, but nothing is recorded or replayed.
"""

import functools
import multiprocessing
import os
import signal
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import schedules
from helpers.schedules import LAYERS, MICROBATCHES, ONE_PROCESS, Layout, Step
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor

import replay_patch
from replay_patch.matrix import tiny
from replay_patch.matrix.attention import cp_positions
from replay_patch.matrix.ranks import launch

pytestmark = pytest.mark.exhaustive  # about our own test bed

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
BLOCK = FULL | {"recompute_method": "block", "recompute_num_layers": LAYERS // 2}
MOE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
MLA = {
    "config_class": MLATransformerConfig,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
    "rope_type": "rope",
}

EXACT = 0.0  # the same matrices are multiplied, in the same order
# Other shapes: what is summed in which order is the processor's choice. 16 roundings of fp32 (a sum
# of 64 terms in random order errs by half the square root of that); measured are up to 5.
SUMS_REORDERED = 16 * 2**-24

ALLTOALL = {"moe_token_dispatcher_type": "alltoall"}
ALLGATHER = {"moe_token_dispatcher_type": "allgather"}


@dataclass(frozen=True)
class Reference:
    """The steps of a one-process model, on the data of two replicas."""

    weights: dict[str, Tensor]
    steps: list[Step]


@functools.cache
def reference(dispatcher: str = "alltoall") -> Reference:
    [made] = launch(reference_rank, 1, ({"moe_token_dispatcher_type": dispatcher},))
    return made


def reference_rank(rank: int, world: int, init_file: str, options: dict[str, Any]) -> Reference:
    [model] = schedules.start(ONE_PROCESS, rank, init_file, **options)
    steps = []
    for replica in range(2):
        model.zero_grad()
        steps.append(schedules.train_step([model], replica))
    return Reference(schedules.weights(model), steps)


def step_rank(
    rank: int,
    world: int,
    init_file: str,
    layout: Layout,
    options: dict[str, Any],
    weights: dict[str, Tensor] | None = None,
) -> Step:
    """A step with the given weights; None: with those that the seed gives."""
    chunks = schedules.start(layout, rank, init_file, **options)
    if weights is not None:
        schedules.load_weights(chunks, weights)
    return schedules.train_step(chunks)


def one_process_step(**options: Any) -> Step:
    [step] = launch(step_rank, 1, (ONE_PROCESS, options))
    return step


def check(step: Step, expected: Step, tolerance: float) -> None:
    """Losses, and the gradients of the routers that `step` has, agree."""
    if step.losses:
        assert step.losses == pytest.approx(expected.losses, rel=0, abs=tolerance)
    for name, gradient in step.router_gradients.items():
        wanted = expected.router_gradients[name]
        assert (gradient - wanted).norm() <= tolerance * wanted.norm(), name


def test_the_plugin_is_active_here() -> None:
    status = replay_patch.status()

    assert status.active
    assert status.trigger == "torch.backends"


# --- several ranks ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout, options, tolerance",
    [
        pytest.param(Layout(tp=2), ALLTOALL, SUMS_REORDERED, id="tp2"),
        pytest.param(Layout(pp=2), ALLTOALL, EXACT, id="pp2"),
        pytest.param(Layout(pp=2, vpp=2), ALLTOALL, EXACT, id="vpp2"),
        pytest.param(Layout(ep=2), ALLTOALL, SUMS_REORDERED, id="ep2"),
        pytest.param(Layout(ep=2), ALLGATHER, SUMS_REORDERED, id="ep2-allgather"),
        pytest.param(Layout(pp=2, vpp=2), ALLTOALL | FULL, EXACT, id="vpp2-recompute"),
    ],
)
def test_ranks_reproduce_one_process(
    layout: Layout, options: dict[str, Any], tolerance: float
) -> None:
    expected = reference(options["moe_token_dispatcher_type"])

    steps = launch(step_rank, layout.world, (layout, options, expected.weights))

    for step in steps:
        check(step, expected.steps[step.replica], tolerance)
    assert {step.replica for step in steps if step.losses} == set(range(layout.ep))
    routers = {name for step in steps for name in step.router_gradients}
    assert routers == set(expected.steps[0].router_gradients)


def test_the_default_flags_are_refused_for_virtual_stages() -> None:
    config = tiny.moe_config(**Layout(pp=2, vpp=2).sizes)

    with pytest.raises(ValueError, match=r"wrong activations .* \*\*VPP_P2P"):
        tiny.model_chunks(config)


# --- one process ------------------------------------------------------------------------------


def test_both_dispatchers_agree() -> None:
    for step, expected in zip(reference("allgather").steps, reference().steps, strict=True):
        check(step, expected, SUMS_REORDERED)


def test_replicas_have_different_data() -> None:
    first, second = reference().steps

    assert first.losses != second.losses  # else a wrong exchange could pass


@pytest.mark.parametrize(
    "options, recomputed",
    [
        pytest.param(FULL, LAYERS, id="full"),
        pytest.param(BLOCK, LAYERS // 2, id="block"),
        pytest.param(MOE, LAYERS, id="selective-moe"),
    ],
)
def test_recompute_changes_no_bit(options: dict[str, Any], recomputed: int) -> None:
    expected = reference().steps[0]

    step = one_process_step(**options)

    check(step, expected, EXACT)
    assert expected.router_calls == LAYERS * MICROBATCHES
    assert step.router_calls == (LAYERS + recomputed) * MICROBATCHES


def test_dense_layers_have_no_router() -> None:
    step = one_process_step(moe_layer_freq=[0, 1, 0, 1])

    assert set(step.router_gradients) == {f"decoder.layers.{i}.mlp.router" for i in (1, 3)}
    assert all(gradient.any() for gradient in step.router_gradients.values())


def test_a_prediction_block_has_a_router() -> None:
    step = one_process_step(mtp_num_layers=1, mtp_loss_scaling_factor=0.1)

    added = set(step.router_gradients) - set(reference().steps[0].router_gradients)
    assert [name.startswith("mtp.layers.0.") for name in added] == [True]
    assert all(gradient.any() for gradient in step.router_gradients.values())


def test_latent_attention_trains() -> None:
    step = one_process_step(**MLA)

    assert torch.tensor(step.losses).isfinite().all()
    assert all(gradient.any() for gradient in step.router_gradients.values())


def test_the_attention_in_plain_torch_is_megatrons() -> None:
    step = one_process_step(torch_attention=True)

    check(step, reference().steps[0], SUMS_REORDERED)


# --- packed sequences, also over context-parallel ranks ---------------------------------------

LENGTHS = [8, 4, 12]


@dataclass(frozen=True)
class Packed:
    """What the tokens of one rank gave."""

    places: Tensor  # int64 [tokens]: where they are in the packed sequence
    losses: Tensor  # fp32 [tokens]
    gradients: dict[str, Tensor]  # of the routers, summed over the ranks


def packed_rank(rank: int, world: int, init_file: str) -> Packed:
    """All sequences in one packed one."""
    [model] = schedules.start(Layout(cp=world), rank, init_file, torch_attention=True)
    sequence, position = cp_positions(LENGTHS, world, rank)
    ends = torch.tensor([0, *LENGTHS]).cumsum(0)
    places = ends[sequence] + position
    ends = ends.to(torch.int32)
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=max(LENGTHS),
        max_seqlen_kv=max(LENGTHS),
    )
    tokens, labels = (t[None, places] for t in drawn())
    losses = model(tokens, position[None], None, labels=labels, packed_seq_params=params)
    losses.sum().backward()
    gradients = schedules.router_gradients([model])
    for gradient in gradients.values():
        dist.all_reduce(gradient)
    return Packed(places, losses.detach()[0], gradients)


def separate_rank(rank: int, world: int, init_file: str) -> Packed:
    """The same sequences one after the other, with Megatron's own attention."""
    [model] = schedules.start(ONE_PROCESS, rank, init_file)
    losses = []
    for tokens, labels in zip(*(t.split(LENGTHS) for t in drawn()), strict=True):
        positions = torch.arange(len(tokens))
        loss = model(tokens[None], positions[None], None, labels=labels[None])
        loss.sum().backward()
        losses.append(loss.detach()[0])
    gradients = schedules.router_gradients([model])
    return Packed(torch.arange(sum(LENGTHS)), torch.cat(losses), gradients)


def drawn() -> Tensor:
    """Tokens and labels, [2, all tokens]."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, tiny.VOCAB_SIZE, (2, sum(LENGTHS)), generator=generator)


@pytest.mark.parametrize("world", [1, 2])
def test_packed_sequences_are_as_if_alone(world: int) -> None:
    [expected] = launch(separate_rank, 1)

    ranks = launch(packed_rank, world)

    places = torch.cat([rank.places for rank in ranks])
    losses = torch.cat([rank.losses for rank in ranks])
    assert sorted(places.tolist()) == expected.places.tolist()
    torch.testing.assert_close(losses, expected.losses[places], rtol=0, atol=SUMS_REORDERED)
    for name, wanted in expected.gradients.items():
        difference = ranks[0].gradients[name] - wanted
        assert difference.norm() <= SUMS_REORDERED * wanted.norm(), name


# --- launch -----------------------------------------------------------------------------------


def fails(rank: int, world: int, init_file: str) -> None:
    tiny.init(world, rank, init_file)
    if rank == 1:
        raise KeyError("a reason")
    dist.barrier()


def dies(rank: int, world: int, init_file: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(rank: int, world: int, init_file: str) -> None:
    time.sleep(600)


def test_a_failing_rank_is_reported_and_the_others_are_killed() -> None:
    started = time.monotonic()

    with pytest.raises(RuntimeError, match=r"launch\(fails\)") as error:
        launch(fails, 2, timeout=100)

    assert "--- rank 1\nTraceback" in str(error.value)
    assert "KeyError: 'a reason'" in str(error.value)
    assert time.monotonic() - started < 50
    assert multiprocessing.active_children() == []


def test_a_rank_that_dies_is_reported() -> None:
    with pytest.raises(RuntimeError, match=r"launch\(dies\): exit codes by rank \[-9\]"):
        launch(dies, 1)


def test_a_hanging_rank_is_killed() -> None:
    with pytest.raises(RuntimeError, match=r"launch\(hangs\): .*still running after 0\.2 s"):
        launch(hangs, 1, timeout=0.2)

    assert multiprocessing.active_children() == []


def after_groups(rank: int, world: int, init_file: str) -> tuple[str, list[str]]:
    tiny.init()
    tiny.shutdown()
    with pytest.raises(RuntimeError) as error:
        launch(hangs, 1)
    return str(error.value), launch("{} of {}".format, 2, fresh=True)


def test_after_groups_only_fresh_interpreters_are_launched() -> None:
    [(refusal, outcomes)] = launch(after_groups, 1)

    assert "made process groups" in refusal
    assert "fresh=True" in refusal
    assert outcomes == ["0 of 2", "1 of 2"]


def test_several_ranks_need_a_rendezvous() -> None:
    with pytest.raises(ValueError, match="init_file"):
        tiny.init(world=2)

    assert launch("{} of {}".format, 1) == ["0 of 1"]  # no groups were made
