"""From what each rank recorded to the routes of whole sequences, in all MoE layers.

Two steps: over the tensor- and context-parallel ranks, which have other tokens of the same layers,
and over the pipeline ranks, which have other layers of the same tokens. Sizes travel as int64 and
bytes as int8, which gloo, NCCL and HCCL (on every chip: CANN's page of HcclAllGather) all gather.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from replay_patch.errors import RouteError
from replay_patch.routes import Routes
from replay_patch.routes.expert_ids import ids_dtype


@dataclass(frozen=True)
class RankRecord:
    """What one rank recorded in one schedule.

    Attributes:
        loads: per microbatch (lengths of its sequences, int64 [R]: token of each row, -1: padding).
        ids: layer number -> for each microbatch [R, K], compact.
        num_experts: E.
        topk: K.
        device: of the model, where collectives that are not gloo's run.
    """

    loads: list[tuple[tuple[int, ...], Tensor]]
    ids: dict[int, list[Tensor]]
    num_experts: int
    topk: int
    device: torch.device


def routes(record: RankRecord) -> list[Routes]:
    """The routes of every sequence, in load order.
    Raises RouteError, on all ranks of a group alike, if they loaded other sequences, or a token was
    in no rank's layout."""
    layers = sorted(record.ids)
    lengths = [length for load_lengths, _ in record.loads for length in load_lengths]
    own_tokens, own_ids = _own_tokens(record, layers)
    data_group, pipeline_group = _groups()

    ids = torch.zeros(sum(lengths), len(layers), record.topk, dtype=own_ids.dtype)
    is_recorded = torch.zeros(sum(lengths), dtype=torch.bool)
    header = [len(lengths), *lengths, *layers]
    parts = _exchange([header, own_tokens.tolist()], own_ids, data_group, record.device)
    headers = [part.ints[0] for part in parts]
    alike = all(header == headers[0] for header in headers)
    for part in parts if alike else []:
        tokens = torch.tensor(part.ints[1], dtype=torch.int64)
        ids[tokens] = part.data.view(len(tokens), len(layers), record.topk)
        is_recorded[tokens] = True
    missing = int((~is_recorded).sum())

    # What is wrong is raised after the last collective: the other stages wait in it.
    ints = [lengths, layers, [missing, alike]]
    stages = _exchange(ints, ids, pipeline_group, record.device)
    if not alike:
        _differ("tensor- and context-parallel", headers)
    if not all(stage.ints[2][1] for stage in stages):
        raise RouteError(
            "the tensor- and context-parallel ranks of another stage recorded "
            "different things; the error is raised there"
        )
    sequences = [stage.ints[0] for stage in stages]
    if any(of_stage != lengths for of_stage in sequences):
        _differ("pipeline", sequences)
    missing = max(stage.ints[2][0] for stage in stages)
    if missing:
        raise RouteError(
            f"{missing} of {sum(lengths)} tokens were in no rank's layout: expected every token in "
            "the rows of one context- or tensor-parallel rank"
        )
    ids_by_layer = {
        layer: stage.data.view(sum(lengths), len(stage.ints[1]), record.topk)[:, index]
        for stage in stages
        for index, layer in enumerate(stage.ints[1])
    }
    numbers = tuple(sorted(ids_by_layer))
    if not numbers:
        return []
    whole = torch.stack([ids_by_layer[layer] for layer in numbers], dim=1)
    pieces = torch.split(whole, lengths)
    return [Routes(piece, record.num_experts, layers=numbers) for piece in pieces]


def _own_tokens(record: RankRecord, layers: Sequence[int]) -> tuple[Tensor, Tensor]:
    """int64 [n], the tokens in this rank's rows, numbered over all loads; their ids [n, L, K]."""
    tokens, tables, first = [], [], 0
    for number, (lengths, rows) in enumerate(record.loads):
        real = rows >= 0
        tokens.append(rows[real] + first)
        first += sum(lengths)
        if layers:
            ids = torch.stack([record.ids[layer][number] for layer in layers], dim=1).cpu()
            tables.append(ids[real])
    numbers = torch.cat(tokens) if tokens else torch.zeros(0, dtype=torch.int64)
    empty = torch.zeros(len(numbers), 0, record.topk, dtype=ids_dtype(record.num_experts))
    return numbers, torch.cat(tables) if tables else empty


def _groups() -> tuple[Any, Any]:
    """(tensor- and context-parallel, pipeline) group; None where one rank is all there is."""
    if not dist.is_initialized():
        return None, None
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return None, None
    groups = (
        parallel_state.get_tensor_and_context_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
    )
    first, second = (None if dist.get_world_size(group) == 1 else group for group in groups)
    return first, second


@dataclass(frozen=True)
class _Part:
    """What one rank sent."""

    ints: list[list[int]]
    data: Tensor


def _exchange(ints: list[list[int]], data: Tensor, group: Any, device: torch.device) -> list[_Part]:
    """What each rank of the group (None: this one) sent, in rank order; the data arrives flat.
    Every rank sends as many lists. Collectives that are not gloo's run on the device."""
    if group is None:
        return [_Part(ints, data.flatten())]
    numbers = [len(ints), *(len(each) for each in ints), *(n for each in ints for n in each)]
    head = torch.tensor(numbers, dtype=torch.int64)
    payload = torch.cat([_bytes(head), _bytes(data)])
    if "gloo" in dist.get_backend(group):
        device = torch.device("cpu")
    sizes = torch.tensor([len(head), len(payload)], dtype=torch.int64, device=device)
    world = dist.get_world_size(group)
    all_sizes = [torch.empty_like(sizes) for _ in range(world)]
    dist.all_gather(all_sizes, sizes, group=group)
    of_ranks = [tuple(size.tolist()) for size in all_sizes]
    longest = max(size for _, size in of_ranks)
    mine = torch.zeros(longest, dtype=torch.int8, device=device)
    mine[: len(payload)] = payload.to(device)
    received = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(received, mine, group=group)
    return [
        _unpack(payload[:size].cpu(), count, data.dtype)
        for payload, (count, size) in zip(received, of_ranks, strict=True)
    ]


def _unpack(payload: Tensor, count: int, dtype: torch.dtype) -> _Part:
    # clone: a view with another dtype needs memory that is aligned for it.
    numbers = payload[: count * 8].clone().view(torch.int64).tolist()
    lists, begin = [], 1 + numbers[0]
    for length in numbers[1 : 1 + numbers[0]]:
        lists.append(numbers[begin : begin + length])
        begin += length
    return _Part(lists, payload[count * 8 :].clone().view(dtype))


def _bytes(tensor: Tensor) -> Tensor:
    flat = tensor.contiguous().flatten()
    return flat.view(torch.int8) if flat.numel() else torch.zeros(0, dtype=torch.int8)


def _differ(ranks: str, headers: list[list[int]]) -> NoReturn:
    raise RouteError(
        f"the {ranks} ranks recorded different things: sequences or layers {headers}; expected "
        "the same microbatches, loaded in the same order"
    )
