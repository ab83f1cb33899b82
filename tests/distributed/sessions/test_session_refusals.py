"""What a session refuses, and what its errors name. One process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import sessions
from helpers.one_process import alone, build, layout, logits_of, whole_routes
from helpers.schedules import LENGTH, WIDTH
from megatron.core.models.gpt import GPTModel

from replay_patch import LayoutError, RouteError, Routes, TokenLayout, recording, replaying


def refused(message: str, model: Any, work: Callable[[Any], None]) -> Any:
    """A recording session in which `work(record)` is refused, at once or on leaving."""

    def run() -> None:
        with record:
            work(record)

    record = recording(model)
    with pytest.raises(RouteError, match=message):
        run()
    return record


@alone
def test_loads_that_do_not_match_forwards_are_refused() -> None:
    model = build()

    def twice(record: Any) -> None:
        record.load(model, layout())
        logits_of(model)
        logits_of(model)

    def unused(record: Any) -> None:
        record.load(model, layout())
        record.load(model, layout())
        logits_of(model)

    refused(r"layer 1: a forward with nothing loaded", model, lambda _: logits_of(model))
    refused(r"nothing loaded since microbatch 0", model, twice)
    record = refused(r"microbatch 0 of chunk 0 .* layers \[1, 2, 3, 4\]", model, unused)
    with pytest.raises(RouteError, match=r"load\(\) in a session that is over"):
        record.load(model, layout())
    with pytest.raises(RouteError, match=r"routes\(\) of a session that is over"):
        record.routes()
    other = build()
    refused(r"no chunk of this session's model", model, lambda rec: rec.load(other, layout()))


@alone
def test_a_load_inside_a_backward_is_refused() -> None:
    model = build()

    def work(record: Any) -> None:
        record.load(model, layout())
        out = logits_of(model)
        out.register_hook(lambda _: record.load(model, layout()))
        out.sum().backward()

    refused(r"load\(\) inside a backward pass", model, work)


@alone
def test_routes_that_do_not_fit_are_refused_at_the_load() -> None:
    model, good = build(), whole_routes()
    ids = good[0].expert_ids
    bad = {
        r"routes of 1 sequences: the layout has 2": good[:1],
        r"trajectory 0 .* 5 rows: expected to end after 8": [Routes(ids[:5], 8), good[1]],
        r"trajectory 0 .* 16 experts, top-k 3: the model has 8": [Routes(ids, 16)] * 2,
        r"top-k 2: the model has 8 experts, top-k 3": [Routes(ids[..., :2], 8)] * 2,
        r"3 layers of routes": [Routes(ids[:, :3], 8)] * 2,
        r"no routes for layers \[4\]": [Routes(ids[:, :3], 8, layers=(1, 2, 3))] * 2,
        r"routes is one Routes": good[0],
    }
    with replaying(model) as replay:
        for message, routes in bad.items():
            with pytest.raises(RouteError, match=message):
                replay.load(model, routes, layout())
        with pytest.raises(LayoutError, match=r"layout is a list"):
            replay.load(model, good, [8, 8])
        with pytest.raises(LayoutError, match=r"cp_size"):
            replay.load(model, good, TokenLayout.padded([8, 8], 8, cp_size=2))

        replay.load(model, good, layout())  # none of these counts as a load
        logits_of(model)


def record_with(model: Any, given: TokenLayout) -> None:
    with recording(model) as record:
        record.load(model, given)
        logits_of(model)


@alone
def test_a_layout_of_another_shape_is_refused_also_with_as_many_rows() -> None:
    model = build()
    for wrong, shape in (
        (TokenLayout.padded([8, 8], 16), "16 x 2"),
        (TokenLayout.packed([8, 8]), "16 x 1"),
        (TokenLayout.padded([2] * 8, 2), "2 x 8"),
    ):
        by_router = rf"layer 1: hidden states of 8 positions x 2 sequences; expected {shape}"
        by_model = r"padding_mask has the shape .* expected \[2, 8\]"  # where it holds the mask
        with pytest.raises((RouteError, LayoutError), match=f"{by_router}|{by_model}"):
            record_with(model, wrong)


@alone
def test_what_is_no_model_and_no_routes_is_refused() -> None:
    model = build()
    for wrong in (None, torch.nn.Sequential(model), (chunk for chunk in [model])):
        with pytest.raises(RouteError, match=r"the model is a .* without a config"):
            replaying(wrong)
    with replaying(torch.nn.ModuleList([model])) as replay:
        for lost in (None, 5):
            with pytest.raises(RouteError, match=rf"routes is {lost}: expected a list of Routes"):
                replay.load(model, lost, layout())
        replay.load(model, whole_routes(), layout())
        logits_of(model)


@alone
def test_layers_that_the_config_does_not_mean_are_refused() -> None:
    model = build()
    for number, router in sessions.routers_of([model]).items():
        router.set_layer_number(number + 1)

    with pytest.raises(RouteError, match=r"layers \(2, 3, 4, 5\); expected \(1, 2, 3, 4\)"):
        recording(model).__enter__()


@alone
def test_parts_of_a_router_called_one_by_one_are_refused() -> None:
    model = build()
    router = sessions.routers_of([model])[2]
    hidden = torch.randn(LENGTH, WIDTH, 16)

    with recording(model) as record:
        record.load(model, layout())
        with pytest.raises(RouteError, match=r"outside of TopKRouter.forward"):
            router.routing(router.gating(hidden))
        logits_of(model)


@alone
def test_the_mask_is_what_the_model_takes() -> None:
    takes = "padding_mask" in GPTModel.forward.__code__.co_varnames
    model = build()
    lengths = [LENGTH, 5]
    with recording(model) as record:
        given = record.load(model, TokenLayout.padded(lengths, LENGTH))
        logits_of(model, **given)
    assert list(given) == (["padding_mask"] if takes else [])
    for mask in given.values():
        assert mask.dtype == torch.bool
        assert mask.sum(dim=1).tolist() == [0, 3]
