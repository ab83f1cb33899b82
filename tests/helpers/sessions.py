"""Schedules in which every router call is compared with the routes that were given for its tokens.

The truth is independent of sessions. `oracle` runs one process, one microbatch after the other,
without recompute, through Megatron's low-level replay. It keeps what each router got as input, so
that any call of any schedule can be told by its input: which microbatch it is of, and hence which
rows of the routing map it must give. B sequences, S positions, R router rows = S * B.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from helpers import schedules
from helpers.schedules import LAYERS, LENGTH, MICROBATCHES, ONE_PROCESS, WIDTH, Layout
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplayAction
from torch import Tensor

from replay_patch import Routes, TokenLayout, replaying
from replay_patch.matrix import tiny
from replay_patch.matrix.attention import cp_positions

E, K = 8, 3
HOLE, PADDING = -1, -2
OPTIONS = {"num_moe_experts": E, "moe_router_topk": K, "enable_routing_replay": False}


@dataclass(frozen=True)
class Batch:
    """A microbatch of a replica, of sequences that differ in length (padding is on the right).

    Attributes:
        tokens, labels: [B, S].
        lengths: of the sequences.
        routes: one per sequence.
        wanted: [layers, R, K], the ids of each row of the whole; HOLE or PADDING in their rows.
    """

    tokens: Tensor
    labels: Tensor
    lengths: list[int]
    routes: list[Routes]
    wanted: Tensor


def batches(replica: int, layers: int = LAYERS) -> list[Batch]:
    """Of one training step; every call with these arguments gives equal ones."""
    generator = torch.Generator().manual_seed(100 + replica)
    return [_batch(generator, number, layers) for number in range(MICROBATCHES)]


def _batch(generator: torch.Generator, number: int, layers: int) -> Batch:
    tokens, labels = torch.randint(
        0, tiny.VOCAB_SIZE, (2, WIDTH, LENGTH), generator=generator
    ).unbind()
    lengths = [LENGTH - (number + i) % 3 for i in range(WIDTH)]
    wanted = torch.full((layers, LENGTH, WIDTH, K), PADDING)
    routes = []
    for i, length in enumerate(lengths):
        rows = length - (number + i) % 2  # the last token of a rollout has no route
        ids = torch.rand(rows, layers, E, generator=generator).argsort(dim=2)[..., :K]
        captured = torch.rand(rows, generator=generator) > 0.2
        routes.append(Routes(ids, E, captured=captured))
        wanted[:, :length, i] = HOLE
        wanted[:, :rows, i] = torch.where(captured[:, None, None], ids, HOLE).transpose(0, 1)
    return Batch(tokens, labels, lengths, routes, wanted.flatten(1, 2))


# --- the truth --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Truth:
    """What a replica does, told by one process.

    Attributes:
        inputs: [layers, microbatches, R, H] of the routers.
        maps: bool [layers, microbatches, R, E], what they gave.
        losses: of the microbatches.
        gradients: of the routers, of the mean over microbatches, by `schedules.global_name`.
    """

    inputs: Tensor
    maps: Tensor
    losses: list[float]
    gradients: dict[str, Tensor]


def oracle(rank: int, world: int, init_file: str, options: dict[str, Any]) -> Any:
    """(weights, native truth, replayed truth) of two replicas, as a rank of `launch`."""
    tiny.init(world, rank, init_file)
    [model] = schedules.build(ONE_PROCESS, **OPTIONS | options | {"enable_routing_replay": True})
    found = {
        replay: [_one_by_one(model, batches(replica), replay) for replica in range(2)]
        for replay in (False, True)
    }
    return schedules.weights(model), found[False], found[True]


def _one_by_one(model: Any, given: Sequence[Batch], replay: bool) -> Truth:
    model.zero_grad()
    routers = routers_of([model])
    inputs, maps, losses = [], [], []
    for batch in given:
        with noted(routers) as calls:
            for layer, router in routers.items():
                if replay:
                    # Rows that repeat an expert route natively: holes and padding.
                    ids = batch.wanted[layer - 1].clamp(min=0)
                    router.router_replay.set_target_indices(ids)
                    router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
            loss = mean_loss(model(batch.tokens, positions(), None, labels=batch.labels), batch)
            (loss / len(given)).backward()
        for router in routers.values():
            router.router_replay.clear_router_replay_action()
            router.router_replay.clear_indices()
        inputs.append(torch.stack([call.input for call in calls]))
        maps.append(torch.stack([call.map for call in calls]))
        losses.append(float(loss))
    gradients = schedules.router_gradients([model])
    return Truth(torch.stack(inputs, 1), torch.stack(maps, 1), losses, gradients)


def positions() -> Tensor:
    return torch.arange(LENGTH).expand(WIDTH, LENGTH)


def mean_loss(losses: Tensor, batch: Batch, here: Tensor | None = None) -> Tensor:
    """The mean over the real tokens of the whole microbatch, of the positions that are here."""
    here = torch.arange(LENGTH) if here is None else here
    real = here[None] < torch.tensor(batch.lengths)[:, None]
    return (losses.float() * real).sum() / sum(batch.lengths)


# --- a schedule -------------------------------------------------------------------------------


@dataclass
class Call:
    """One router call: layer, input [R, H], map [R, E]."""

    layer: int
    input: Tensor
    map: Tensor


@contextlib.contextmanager
def noted(routers: dict[int, Any]) -> Iterator[list[Call]]:
    """Collect the calls of routers."""
    calls: list[Call] = []

    def add(router: Any, args: Any, out: Any) -> None:
        hidden, routing_map = args[0].detach(), out[1].detach()
        calls.append(Call(router.layer_number, hidden.flatten(0, 1), routing_map))

    hooks = [router.register_forward_hook(add) for router in routers.values()]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def routers_of(chunks: list[Any]) -> dict[int, Any]:
    """Decoder routers by layer number."""
    return {
        module.layer_number: module
        for chunk in chunks
        for name, module in chunk.named_modules()
        if isinstance(module, TopKRouter) and "mtp" not in name
    }


@dataclass
class Outcome:
    """What a rank's schedule did.

    Attributes:
        wrong: router calls with another map than their microbatch's, in words.
        calls: (layer, microbatch) -> how often the router was called.
        losses: of the microbatches; empty but on the last stage.
        gradients: of the routers of this rank.
    """

    replica: int
    wrong: list[str]
    calls: dict[tuple[int, int], int]
    losses: list[float]
    gradients: dict[str, Tensor]
    report: dict[str, Any] = field(default_factory=dict)


def token_layout(lengths: list[int], where: Layout, sequence_parallel: bool = True) -> TokenLayout:
    return TokenLayout.padded(
        lengths,
        LENGTH,
        tp_size=where.tp,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        sequence_parallel=sequence_parallel and where.tp > 1,
        cp_size=where.cp,
        cp_rank=parallel_state.get_context_parallel_rank(),
    )


def held(where: Layout) -> tuple[Tensor, Tensor]:
    """(positions, router rows of the whole) that this rank holds; not by TokenLayout."""
    _, here = cp_positions([LENGTH], where.cp, parallel_state.get_context_parallel_rank())
    part = here.chunk(where.tp)[parallel_state.get_tensor_model_parallel_rank()]
    return here, (part[:, None] * WIDTH + torch.arange(WIDTH)).flatten()


class Native:
    """In the place of a session."""

    report = None

    def load(self, chunk: Any, layout: Any) -> dict[str, Any]:
        return {}


def step(where: Layout, chunks: list[Any], session: Any, given: list[Batch], **load: Any) -> Any:
    """A `forward_step_func` that loads each microbatch into the session.

    Args:
        given: what is loaded, by microbatch; the batches themselves come from the iterator.
    """
    here, _ = held(where)
    number = {id(chunk): 0 for chunk in chunks}

    def forward_step(
        iterator: Iterator[Batch], chunk: Any, return_schedule_plan: bool = False
    ) -> tuple[Any, Any]:
        batch, loaded = next(iterator), given[number[id(chunk)]]
        number[id(chunk)] += 1
        layout = token_layout(batch.lengths, where, **load)
        routes = () if session.report is None else (loaded.routes,)
        more = session.load(chunk, *routes, layout)
        call = chunk.build_schedule_plan if return_schedule_plan else chunk
        tokens, labels = (t[:, here] for t in (batch.tokens, batch.labels))

        def loss_of(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            loss = mean_loss(losses, batch, here)
            # Megatron multiplies by the context-parallel size, for a mean over ranks that follows.
            return loss / where.cp, {"loss": loss.detach()}

        return call(tokens, positions()[:, here], None, labels=labels, **more), loss_of

    return forward_step


def run(
    where: Layout, chunks: list[Any], truth: list[Truth], given: Any = None, **options: Any
) -> Outcome:
    """A replaying schedule, checked.

    Args:
        truth: of the replicas.
        given: from a replica's batches to what is loaded, if not the same.
        options: of `run_schedule`.
    """
    replica = parallel_state.get_data_parallel_rank()
    whole = batches(replica)
    with noted(routers_of(chunks)) as calls, replaying(chunks) as replay:
        forward_step = step(where, chunks, replay, given(whole) if given else whole)
        losses = schedules.run_schedule(chunks, whole, forward_step_func=forward_step, **options)
    gradients = {} if options.get("forward_only") else schedules.router_gradients(chunks)
    if where.cp > 1:  # losses and gradients are those of this rank's tokens
        summed = torch.tensor(losses)
        for part in (summed, *gradients.values()):
            dist.all_reduce(part, group=parallel_state.get_context_parallel_group())
        losses = summed.tolist()
    wrong, counts = compare(where, calls, whole, truth[replica])
    told = replay.report
    report = {n: getattr(told, n) for n in ("replayed", "holes", "padding", "overlap")}
    return Outcome(replica, wrong, counts, losses, gradients, report)


def compare(
    where: Layout, calls: list[Call], given: list[Batch], truth: Truth
) -> tuple[list[str], dict[tuple[int, int], int]]:
    """Which calls gave another map than that of the microbatch whose input they got."""
    _, rows = held(where)
    wrong, counts = [], {}
    # Padding takes other experts here and there, and no token looks at it.
    padding = torch.stack([batch.wanted[0, rows, 0] == PADDING for batch in given])
    for call in calls:
        layer = call.layer - 1
        difference = (truth.inputs[layer][:, rows] - call.input).abs().amax(2)
        distance = difference.masked_fill(padding, 0).amax(1)
        number = int(distance.argmin())
        if distance[number] > 1e-4:
            wrong.append(f"layer {call.layer}: an input like no microbatch's, {distance}")
            continue
        counts[call.layer, number] = counts.get((call.layer, number), 0) + 1
        seen = rows if len(call.map) == len(rows) else torch.arange(LENGTH * WIDTH)
        for row, chosen in zip(seen.tolist(), call.map, strict=True):
            ids = given[number].wanted[layer, row].tolist()
            right = truth.maps[layer, number, row] if ids[0] == HOLE else torch.zeros(E).bool()
            if ids[0] >= 0:
                right[ids] = True
            if int(chosen.sum()) != K or (ids[0] != PADDING and not torch.equal(chosen, right)):
                time = counts[call.layer, number]
                wrong.append(f"layer {call.layer}, microbatch {number}, call {time}, row {row}")
    return wrong, counts
