"""Whole schedules: every router call of every microbatch takes exactly the routes it was given.

In every parallel mode and with every recompute that the release offers; `helpers.sessions` says
how that is known.
"""

import dataclasses
import functools
from typing import Any

import pytest
from helpers import schedules, sessions
from helpers.schedules import LAYERS, MICROBATCHES, Layout
from helpers.sessions import Batch, Outcome, Truth
from megatron.core.transformer.transformer_config import TransformerConfig

from replay_patch.matrix import tiny
from replay_patch.matrix.ranks import launch

NONE: dict[str, Any] = {}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
BLOCK = FULL | {"recompute_method": "block", "recompute_num_layers": 1}
MOE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
CORE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
ALLTOALL = {"moe_token_dispatcher_type": "alltoall"}
ALLGATHER = {"moe_token_dispatcher_type": "allgather"}

# fp32. Experts get other rows of padding than in the oracle, so some sums are in another order;
# test_session_records is bitwise.
TOLERANCE = 2e-6

FIELDS = {field.name for field in dataclasses.fields(TransformerConfig)}


@functools.cache
def truth() -> tuple[dict[str, Any], list[Truth], list[Truth]]:
    """(weights, native, replayed): of two replicas."""
    [found] = launch(sessions.oracle, 1, ({},))
    return found


def ranks(
    rank: int, world: int, init_file: str, where: Layout, runs: list[dict[str, Any]], **options: Any
) -> list[Outcome]:
    """One schedule after the other, each with a model of its own."""
    tiny.init(where.world, rank, init_file, **where.sizes)
    return [one_run(where, run, **options) for run in runs]


def one_run(where: Layout, options: dict[str, Any], **more: Any) -> Outcome:
    weights, _, replayed = truth()
    chunks = schedules.build(where, **sessions.OPTIONS | options)
    schedules.load_weights(chunks, weights)
    return sessions.run(where, chunks, replayed, **more)


def check(outcomes: list[Outcome], recomputed: int) -> None:
    """The outcomes of all ranks for one schedule, in which some layers are recomputed."""
    _, _, replayed = truth()
    called: dict[tuple[int, int, int], set[int]] = {}
    for outcome in outcomes:
        assert outcome.wrong == []
        expected = replayed[outcome.replica]
        if outcome.losses:
            assert outcome.losses == pytest.approx(expected.losses, rel=0, abs=TOLERANCE)
        for name, gradient in outcome.gradients.items():
            wanted = expected.gradients[name]
            assert (gradient - wanted).norm() <= TOLERANCE * wanted.norm(), name
        for key, count in outcome.calls.items():
            called.setdefault((outcome.replica, *key), set()).add(count)
    replicas = {outcome.replica for outcome in outcomes}
    assert called.keys() == {
        (r, layer + 1, m) for r in replicas for layer in range(LAYERS) for m in range(MICROBATCHES)
    }
    again = {layer for (_, layer, _), counts in called.items() if counts == {2}}
    assert {max(counts) for counts in called.values()} <= {1, 2}
    assert len(again) == recomputed


MODES = [
    pytest.param(Layout(), [(NONE, 0), (FULL, 4), (BLOCK, 1), (MOE, 4), (CORE, 0)], id="one"),
    pytest.param(Layout(pp=2), [(NONE, 0), (FULL, 4), (BLOCK, 2), (MOE, 4)], id="pp2"),
    pytest.param(Layout(pp=2, vpp=2), [(NONE, 0), (FULL, 4), (BLOCK, 4), (MOE, 4)], id="vpp2"),
    pytest.param(Layout(tp=2), [(NONE, 0), (FULL, 4), (MOE, 4)], id="tp2"),
    pytest.param(Layout(ep=2), [(FULL | ALLTOALL, 4), (MOE | ALLGATHER, 4)], id="ep2"),
    pytest.param(Layout(tp=2, pp=2), [(FULL, 4)], id="tp2pp2"),
    pytest.param(Layout(cp=2), [(NONE, 0), (FULL, 4)], id="cp2"),
]


@pytest.mark.parametrize("where, runs", MODES)
def test_every_router_call_takes_its_microbatchs_routes(
    where: Layout, runs: list[tuple[dict[str, Any], int]]
) -> None:
    truth()  # once, and not in each rank

    outcomes = launch(ranks, where.world, (where, [options for options, _ in runs]))

    for number, (_, recomputed) in enumerate(runs):
        check([of_rank[number] for of_rank in outcomes], recomputed)


OVERLAP = {"unchecked": {"overlap_moe_expert_parallel_comm": True}} | ALLTOALL


@pytest.mark.skipif(
    "overlap_moe_expert_parallel_comm" not in FIELDS, reason="no combined 1F1B before 0.14"
)
@pytest.mark.parametrize(
    "where", [pytest.param(Layout(ep=2), id="ep2"), pytest.param(Layout(pp=2, vpp=2, ep=2), id="x")]
)
def test_combined_1f1b_takes_the_routes(where: Layout) -> None:
    truth()

    outcomes = launch(ranks, where.world, (where, [OVERLAP]))

    check([outcome for [outcome] in outcomes], 0)


def swapped(given: list[Batch]) -> list[Batch]:
    """The routes of the first two microbatches of equal lengths, exchanged."""
    first, second = next(
        (i, j) for i in range(len(given)) for j in range(i) if given[i].lengths == given[j].lengths
    )
    out = list(given)
    out[first], out[second] = given[second], given[first]
    return out


def swapping_rank(rank: int, world: int, init_file: str) -> Outcome:
    tiny.init(world, rank, init_file, **Layout(pp=2).sizes)
    return one_run(Layout(pp=2), FULL, given=swapped)


def test_this_proof_sees_two_swapped_microbatches() -> None:
    truth()

    first, _ = launch(swapping_rank, 2)

    of_layer_1 = {line.split(",")[1] for line in first.wrong if line.startswith("layer 1,")}
    assert of_layer_1 == {" microbatch 0", " microbatch 3"}
