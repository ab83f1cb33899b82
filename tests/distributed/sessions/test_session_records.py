"""`recording()`: nothing changes, every rank gets whole sequences, and replaying them is bitwise.

Sequences without padding here, so that native and replayed runs give experts the same rows.
"""

import importlib.util
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers import schedules, sessions
from helpers.schedules import LAYERS, LENGTH, MICROBATCHES, WIDTH, Layout, Step
from helpers.sessions import Batch, E, K
from megatron.core import parallel_state
from torch import Tensor

from replay_patch import RouteError, Routes, TokenLayout, recording, replaying
from replay_patch.matrix import tiny
from replay_patch.matrix.ranks import launch
from replay_patch.sessions import gather

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
MOE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}


@dataclass
class Recorded:
    """What a rank recorded, and how the runs differ.

    Attributes:
        ids: [sequences, S, layers, K].
        layers: their numbers.
        differing: names of runs with other losses or gradients than the native one.
    """

    replica: int
    ids: Tensor
    layers: Any
    differing: list[str]


def whole_batches(replica: int, routes: list[Routes] | None = None) -> list[Batch]:
    """Sequences of full length, with routes."""
    out = []
    for number, batch in enumerate(sessions.batches(replica)):
        own = [] if routes is None else routes[number * WIDTH :][:WIDTH]
        out.append(Batch(batch.tokens, batch.labels, [LENGTH] * WIDTH, own, torch.empty(0)))
    return out


def train(where: Layout, chunks: list[Any], session: Any, given: list[Batch], **more: Any) -> Step:
    for chunk in chunks:
        chunk.zero_grad()
    forward_step = sessions.step(where, chunks, session, given)
    losses = schedules.run_schedule(chunks, given, forward_step_func=forward_step, **more)
    gradients = {} if more.get("forward_only") else schedules.router_gradients(chunks)
    return Step(0, losses, gradients, 0)


def recording_rank(
    rank: int, world: int, init_file: str, where: Layout, options: dict[str, Any]
) -> Recorded:
    tiny.init(where.world, rank, init_file, **where.sizes)
    replica = parallel_state.get_data_parallel_rank()
    chunks = schedules.build(where, **sessions.OPTIONS | options)
    given = whole_batches(replica)
    runs = {"native": train(where, chunks, sessions.Native(), given)}

    with torch.no_grad(), recording(chunks) as forward_only:
        runs["log-probs"] = train(where, chunks, forward_only, given, forward_only=True)
    routes = forward_only.routes()
    with recording(chunks) as record:
        runs["recorded"] = train(where, chunks, record, given)
    for one, other in zip(routes, record.routes(), strict=True):
        assert same_experts(one.expert_ids, other.expert_ids)
    for update in ("replayed", "replayed again"):
        with replaying(chunks) as replay:
            runs[update] = train(where, chunks, replay, whole_batches(replica, routes))
    return Recorded(
        replica,
        torch.stack([one.expert_ids for one in routes]),
        routes[0].layers,
        [name for name, run in runs.items() if not same(run, runs["native"])],
    )


def same(run: Step, native: Step) -> bool:
    gradients = run.router_gradients or native.router_gradients
    return run.losses == native.losses and all(
        torch.equal(gradient, native.router_gradients[name]) for name, gradient in gradients.items()
    )


def same_experts(one: Tensor, other: Tensor) -> bool:
    """From 0.18 on native top-k sorts a row's columns with gradients only."""
    return torch.equal(one.sort(-1).values, other.sort(-1).values)


def check(ranks: list[Recorded], layers: tuple[int, ...] = tuple(range(1, LAYERS + 1))) -> None:
    """All ranks of a replica have the same routes; those of other replicas differ."""
    assert [rank.differing for rank in ranks] == [[]] * len(ranks)
    assert {rank.layers for rank in ranks} == {layers}
    shape = (MICROBATCHES * WIDTH, LENGTH, len(layers), sessions.K)
    assert {rank.ids.shape for rank in ranks} == {shape}
    for one in ranks:
        for other in ranks:
            assert torch.equal(one.ids, other.ids) is (one.replica == other.replica)


@pytest.mark.parametrize(
    "where, options",
    [
        pytest.param(Layout(), {}, id="one"),
        pytest.param(Layout(), MOE, id="moe"),
        pytest.param(Layout(pp=2), FULL, id="pp2"),
        pytest.param(Layout(pp=2, vpp=2), FULL, id="vpp2"),
        pytest.param(Layout(tp=2), MOE, id="tp2"),
        pytest.param(Layout(ep=2), FULL, id="ep2"),
        pytest.param(Layout(cp=2), {}, id="cp2"),
    ],
)
def test_what_was_recorded_is_replayed_to_the_last_bit(
    where: Layout, options: dict[str, Any]
) -> None:
    check(launch(recording_rank, where.world, (where, options)))


def test_a_stage_without_a_moe_layer_gets_the_routes_too() -> None:
    where = Layout(pp=2)

    ranks = launch(recording_rank, 2, (where, {"moe_layer_freq": [0, 0, 1, 1]}))

    check(ranks, (3, 4))


def test_prediction_blocks_stay_native() -> None:
    options = {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.1}

    ranks = launch(recording_rank, 1, (Layout(), options))

    check(ranks)


GATHERING = pytest.mark.skipif(
    importlib.util.find_spec("megatron.core.transformer.moe.legacy_a2a_token_dispatcher") is None,
    reason="0.12 only",
)


@GATHERING
def test_a_router_that_gathers_its_rows_is_recorded_whole() -> None:
    options = {"moe_token_dispatcher_type": "alltoall_seq"}

    check(launch(recording_rank, 2, (Layout(tp=2), options)))


def losses_rank(rank: int, world: int, init_file: str, dispatcher: str, lengths: Any) -> Tensor:
    """The losses of replayed sequences, by token, with padding after them."""
    where = Layout(tp=2)
    tiny.init(world, rank, init_file, **where.sizes)
    options = {"moe_token_dispatcher_type": dispatcher}
    [model] = schedules.build(where, **sessions.OPTIONS | options)
    layout = TokenLayout.padded(lengths, LENGTH, tp_size=2, tp_rank=rank, sequence_parallel=True)
    generator = torch.Generator().manual_seed(0)
    ids = torch.rand(len(lengths), LENGTH, LAYERS, E, generator=generator).argsort(3)[..., :K]
    routes = [Routes(one[:length], E) for one, length in zip(ids, lengths, strict=True)]
    tokens = torch.randint(0, tiny.VOCAB_SIZE, (len(lengths), LENGTH), generator=generator)
    with torch.no_grad(), replaying(model) as replay:
        more = replay.load(model, routes, layout)
        losses = model(tokens, sessions.positions(), None, labels=tokens, **more)
    return layout.restore(losses)


@GATHERING
@pytest.mark.parametrize("lengths", [(LENGTH, LENGTH), (LENGTH, 3)])
def test_padding_of_a_router_that_gathers_its_rows_is_alike_on_all_ranks(lengths: Any) -> None:
    expected = launch(losses_rank, 2, ("alltoall", lengths))
    found = launch(losses_rank, 2, ("alltoall_seq", lengths))

    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def eval_rank(
    rank: int, world: int, init_file: str, where: Layout, weights: dict[str, Tensor]
) -> list[Tensor]:
    """Routes in eval mode with the weights of one process, with SP and without."""
    tiny.init(where.world, rank, init_file, **where.sizes)
    out = []
    for sequence_parallel in {where.tp > 1, False}:
        options = {"sequence_parallel": sequence_parallel}
        chunks = schedules.build(where, **sessions.OPTIONS | options)
        schedules.load_weights(chunks, weights)
        with torch.no_grad(), recording(chunks) as record:
            step = sessions.step(
                where, chunks, record, whole_batches(0), sequence_parallel=sequence_parallel
            )
            for chunk in chunks:
                chunk.eval()
            schedules.run_schedule(
                chunks, whole_batches(0), forward_step_func=step, forward_only=True
            )
        out.append(torch.stack([one.expert_ids for one in record.routes()]))
    return out


def weights_rank(rank: int, world: int, init_file: str) -> dict[str, Tensor]:
    tiny.init(world, rank, init_file)
    [model] = schedules.build(Layout(), **sessions.OPTIONS)
    return schedules.weights(model)


@pytest.mark.parametrize(
    "where",
    [
        pytest.param(Layout(pp=2, vpp=2), id="vpp2"),
        pytest.param(Layout(tp=2), id="tp2"),
        pytest.param(Layout(cp=2), id="cp2"),
    ],
)
def test_routes_are_those_of_one_process(where: Layout) -> None:
    [weights] = launch(weights_rank, 1)
    [[expected]] = launch(eval_rank, 1, (Layout(), weights))

    for recorded in launch(eval_rank, where.world, (where, weights)):
        for ids in recorded:
            assert same_experts(ids, expected)


# --- the collective by itself -----------------------------------------------------------------


def gathering_rank(rank: int, world: int, init_file: str, parallel: str) -> list[Any]:
    """What is gathered of two tokens in layer 3 (and 5, on the other stage); or the error."""
    tiny.init(world, rank, init_file, **{f"{parallel}_model_parallel_size": 2})
    cpu = torch.device("cpu")
    mine = torch.tensor([[10 + rank, 300 + rank]], dtype=torch.int16)
    both = torch.tensor([[10, 300], [11, 301]], dtype=torch.int16)
    if parallel == "tensor":  # the other token of the same layer, and a row of padding
        rows, ids = torch.tensor([rank, -1]), {3: [torch.cat([mine, mine])]}
    else:
        rows, ids = torch.tensor([0, 1]), {3 + 2 * rank: [both]}
    right = gather.RankRecord([((2,), rows)], ids, 400, 2, cpu)
    short = gather.RankRecord([((3,), rows)], ids, 400, 2, cpu)
    other = gather.RankRecord([((2 + rank,), rows)], ids, 400, 2, cpu)
    found: list[Any] = [(one.expert_ids.tolist(), one.layers) for one in gather.routes(right)]
    for wrong in (short, other):
        with pytest.raises(RouteError) as error:
            gather.routes(wrong)
        found.append(str(error.value))
    return found


def test_ids_of_two_bytes_are_gathered() -> None:
    for parallel, layers in (("tensor", (3,)), ("pipeline", (3, 5))):
        for found, missing, other in launch(gathering_rank, 2, (parallel,)):
            ids = [[[10, 300]] * len(layers), [[11, 301]] * len(layers)]
            assert found == (ids, layers)
            assert "1 of 3 tokens were in no rank's layout" in missing
            assert f"{parallel}-" in other or f"the {parallel} ranks recorded" in other
