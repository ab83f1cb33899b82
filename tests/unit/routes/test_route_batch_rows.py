"""Routes in the order of the router rows: against plain Python, and what memory it takes."""

import tracemalloc
from typing import Any

import pytest
import torch
from helpers import token_layouts
from helpers.token_layouts import Case, padding_ids
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from replay_patch import LayoutError, RouteBatch, RouteError, Routes, TokenLayout

MOE_LAYERS = (2, 3, 5, 8)


def trajectory(tokens: int, num_experts: int, topk: int, start: int = 0, **options: Any) -> Routes:
    ids = torch.rand(tokens - start, len(MOE_LAYERS), num_experts).argsort(2)[..., :topk]
    captured = torch.rand(tokens - start) < 0.8
    return Routes(ids, num_experts, captured=captured, start=start, **options)


@st.composite
def batches(draw: Any) -> tuple[Case, RouteBatch]:
    case = draw(token_layouts.cases)
    num_experts, topk = draw(st.sampled_from([(8, 1), (8, 3), (8, 8), (300, 2), (300, 8)]))
    torch.manual_seed(draw(st.integers(0, 99)))
    entries = []
    for length in case.lengths:
        tokens = max(0, length - draw(st.integers(0, 1)))
        entries.append(trajectory(tokens, num_experts, topk, draw(st.integers(0, tokens))))
    return case, RouteBatch(entries)


@settings(max_examples=200, deadline=None)
@given(
    batches(),
    st.lists(st.sampled_from(MOE_LAYERS), unique=True),
    st.sampled_from([1, 4]),
    st.integers(0, 9),
)
def test_every_row_has_the_route_of_its_token(
    made: tuple[Case, RouteBatch], layers: list[int], ep_size: int, first: int
) -> None:
    case, batch = made
    of_token = [
        one.expert_ids[at - one.start] if 0 <= at - one.start < one.num_tokens else None
        for one, length in zip(batch, case.lengths, strict=True)
        for at in range(length)
    ]
    known = [
        bool(0 <= at - one.start < one.num_tokens and one.captured[at - one.start])
        for one, length in zip(batch, case.lengths, strict=True)
        for at in range(length)
    ]
    padding = case.rows.count(-1)
    fill = padding_ids(len(layers), padding, batch[0].topk, batch[0].num_experts, ep_size, first)

    rows = batch.to_rows(case.make(), layers, MOE_LAYERS, ep_size=ep_size, first_padding=first)

    assert rows.expert_ids.shape == (len(layers), len(case.rows), batch[0].topk)
    assert rows.expert_ids.dtype is batch[0].expert_ids.dtype
    assert rows.padding.tolist() == [token == -1 for token in case.rows]
    assert rows.captured.tolist() == [token != -1 and known[token] for token in case.rows]
    assert rows.holes.tolist() == [token != -1 and not known[token] for token in case.rows]
    assert rows.next_padding == first + fill.numel()
    assert torch.equal(rows.expert_ids[:, rows.padding], fill)
    assert not rows.expert_ids[:, rows.holes].any()
    places = [MOE_LAYERS.index(number) for number in layers]
    for row, token in enumerate(case.rows):
        if token != -1 and known[token]:
            wanted = of_token[token]
            assert wanted is not None
            assert rows.expert_ids[:, row].tolist() == wanted[places].tolist()


def test_a_missing_last_route_shifts_no_other_sequence() -> None:  # 44
    batch = RouteBatch([trajectory(2, 8, 2), trajectory(1, 8, 2)])
    for one in batch:
        one.captured.fill_(True)

    rows = batch.to_rows(TokenLayout.packed([3, 2]))

    assert rows.captured.tolist() == [True, True, False, True, False]
    assert torch.equal(rows.expert_ids[:, 3], batch[1].expert_ids[0])


def test_all_layers_are_taken_where_none_are_named() -> None:
    batch = RouteBatch([trajectory(3, 8, 2), trajectory(2, 8, 2)])
    layout = TokenLayout.packed([3, 2])

    named = batch.to_rows(layout, MOE_LAYERS, MOE_LAYERS)

    assert torch.equal(batch.to_rows(layout).expert_ids, named.expert_ids)


def test_other_rows_than_those_of_the_layout() -> None:
    """The routers of 0.12's alltoall_seq dispatcher see all rows of the tensor-parallel ranks."""
    batch = RouteBatch([trajectory(4, 8, 2)])
    cut = TokenLayout.packed([4], tp_size=2, tp_rank=1, sequence_parallel=True)

    rows = batch.to_rows(cut, rows=cut.input_rows.t().flatten())

    assert torch.equal(rows.expert_ids, batch.to_rows(TokenLayout.packed([4])).expert_ids)


@pytest.mark.parametrize("packed", [True, False])
def test_rows_in_any_order(packed: bool) -> None:
    batch = RouteBatch([trajectory(4, 8, 2), trajectory(2, 8, 2)])
    layout = TokenLayout.packed([4, 2], pad_to=8) if packed else TokenLayout.padded([4, 2], 4)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0))
    in_order = batch.to_rows(layout)

    rows = batch.to_rows(layout, rows=layout.rows[order])

    assert torch.equal(rows.captured, in_order.captured[order])
    captured = rows.captured
    assert torch.equal(rows.expert_ids[:, captured], in_order.expert_ids[:, order][:, captured])


def test_rows_that_do_not_fit_the_layout_are_refused() -> None:
    batch = RouteBatch([trajectory(1, 8, 2), trajectory(1, 8, 2)])

    with pytest.raises(LayoutError, match="3 rows: expected a multiple of the 2 sequences"):
        batch.to_rows(TokenLayout.padded([1, 1], 2), rows=torch.tensor([0, 1, -1]))


def test_a_stage_without_moe_layers() -> None:
    rows = RouteBatch([trajectory(4, 8, 2)]).to_rows(TokenLayout.packed([4]), [], MOE_LAYERS)

    assert rows.expert_ids.shape == (0, 4, 2)


@pytest.mark.parametrize(
    "entries, arguments, message",
    [
        ([], {}, "no trajectories"),
        ([4], {}, "routes of 1 sequences: the layout has 2"),
        ([4, 5], {}, "trajectory 1 has routes of 5 rows: expected to end after 2 tokens"),
        ([4, 2], {"layer_numbers": [4], "moe_layers": MOE_LAYERS}, r"trajectory 0: layers \[4\]"),
        ([4, 2], {"layer_numbers": [2]}, "trajectory 0: 4 layers of routes.*pass moe_layers="),
        ([4, 2], {"ep_size": 3}, "8 experts over 3 ranks"),
    ],
)
def test_refused(entries: list[int], arguments: dict[str, Any], message: str) -> None:
    batch = RouteBatch(trajectory(tokens, 8, 2) for tokens in entries)

    with pytest.raises(RouteError, match=message):
        batch.to_rows(TokenLayout.packed([4, 2]), **arguments)


@pytest.mark.parametrize("other", ["all", (2, 3, 5, 9)])
def test_layers_that_are_not_the_same_in_all_trajectories_are_refused(other: Any) -> None:
    batch = RouteBatch([trajectory(2, 8, 2), trajectory(2, 8, 2, layers=other)])

    with pytest.raises(RouteError, match="trajectory 1 has layers="):
        batch.to_rows(TokenLayout.packed([2, 2]))


# --- memory -----------------------------------------------------------------------------------


def peak_bytes(call: Any) -> tuple[Any, int]:
    """(what the call returns, the most bytes that torch and numpy held beyond those before it)."""
    tracemalloc.start()
    call()
    _, in_numpy = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        result = call()
    held = in_torch = 0
    for event in trace.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            in_torch = max(in_torch, held)
    return result, in_torch + in_numpy


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


@pytest.mark.parametrize("num_experts, itemsize", [(128, 1), (512, 2)])
@pytest.mark.parametrize("packed", [True, False])
def test_a_stage_takes_no_more_than_its_own_layers(  # 85
    num_experts: int, itemsize: int, packed: bool
) -> None:
    """T x local layers x K x itemsize, and the index of one layer while the routers are called."""
    lengths, layers, topk, local = [700, 1000, 300], 48, 8, list(range(13, 25))
    every_eighth = torch.arange(topk) * (num_experts // topk)
    ids = (torch.arange(1000)[:, None, None] + torch.arange(layers)[:, None] + every_eighth) % (
        num_experts
    )
    batch = RouteBatch(Routes(ids[:length], num_experts) for length in lengths)
    numbers = range(1, layers + 1)
    layout = TokenLayout.packed(lengths) if packed else TokenLayout.padded(lengths, 1000)
    rows = len(layout.rows)
    stage, one_index = rows * len(local) * topk * itemsize, rows * topk * 8

    aligned, peak = peak_bytes(lambda: batch.to_rows(layout, local, numbers))
    assert peak <= stage + one_index
    assert storage(aligned.expert_ids) == stage

    index, _ = peak_bytes(lambda: aligned.expert_ids[0].long())
    assert storage(index) == one_index

    # The same in two steps, as when the routes are sent to the stage in between.
    own, peak = peak_bytes(lambda: batch.for_layers(local, numbers))
    sent = sum(lengths) * len(local) * topk * itemsize
    assert sum(storage(one.expert_ids) for one in own) == sent
    assert peak <= sent + one_index
    again, peak = peak_bytes(lambda: own.to_rows(layout))
    assert peak <= stage + one_index
    assert torch.equal(again.expert_ids, aligned.expert_ids)
