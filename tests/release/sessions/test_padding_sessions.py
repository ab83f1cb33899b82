"""Sessions hand over the mask: as an argument where Megatron takes one, else they hold it."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.exactness import loss
from helpers.padding_cases import (
    FULL,
    LENGTH,
    MOE,
    RELEASE,
    TAKES_MASK,
    TOTAL,
    B,
    E,
    K,
    batch,
    far,
    loss_of,
    make_model,
    masked_loss,
    routers,
    take,
)

from replay_patch import LayoutError, RouteError, Routes, TokenLayout, recording, replaying
from replay_patch.replay import mask_tracker

LAYOUT = TokenLayout.padded([LENGTH] * B, TOTAL)
MTP = {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.1}
HELD = pytest.mark.skipif(TAKES_MASK, reason="Megatron's model takes the mask")


def routes(captured: Any = None) -> list[Routes]:
    ids = torch.rand(B, LENGTH, 2, E, generator=torch.Generator().manual_seed(5)).argsort(3)
    return [Routes(one[..., :K], E, captured=captured) for one in ids]


def recorded(model: Any, **more: Any) -> dict[str, Any]:
    with recording(model) as record:
        loss_of(model, TOTAL, **record.load(model, LAYOUT), **more).backward()
    return take(model)


def replayed(model: Any, given: Any = None, **options: Any) -> dict[str, Any]:
    with replaying(model, **options) as replay:
        more = replay.load(model, given or routes(), LAYOUT)
        loss_of(model, TOTAL, **more).backward()
    return take(model)


class Around(torch.nn.Module):
    """A model around Megatron's, whose forward knows no mask."""

    def __init__(self, language_model: Any) -> None:
        super().__init__()
        self.language_model, self.config = language_model, language_model.config
        self.pre_process = self.post_process = True

    def forward(self, tokens: Any, positions: Any, mask: Any, labels: Any) -> Any:
        return self.language_model(tokens, positions, mask, labels=labels)


def test_load_returns_what_this_model_takes() -> None:
    model = make_model()
    expected = {"padding_mask"} if TAKES_MASK else set()

    with recording(model) as record, torch.no_grad():
        more = record.load(model, LAYOUT)
        assert more.keys() == expected
        assert all(torch.equal(mask, batch(TOTAL)[2]) for mask in more.values())
        loss_of(model, TOTAL, **more)


@pytest.mark.parametrize("options", [{}, FULL, MOE], ids=["plain", "full", "moe"])
def test_a_recorded_step_is_that_of_the_same_mask(options: dict[str, Any]) -> None:
    model = make_model(**options)
    masked_loss(model).backward()

    assert far(take(model), recorded(model), tolerance=0) == []


@pytest.mark.skipif(
    RELEASE in ((0, 16), (0, 17)), reason="Megatron itself gives these MTP routers no mask"
)
def test_mtp_routers_which_are_in_no_session_have_it_too() -> None:
    model = make_model(**MTP, **FULL)
    masked_loss(model).backward()
    expected = take(model)

    found = recorded(model)

    assert far(expected, found, tolerance=0) == []
    assert found["counts of router 2"].sum() == B * LENGTH * K


@pytest.mark.parametrize("options", [{}, FULL], ids=["plain", "full"])
def test_a_replayed_step_counts_the_routes_really_taken(options: dict[str, Any]) -> None:
    """D12: those of real tokens, although the bias had no part in them."""
    found = replayed(make_model(**options))

    for layer in range(2):
        taken = sum(
            torch.bincount(r.expert_ids[:, layer].flatten().long(), minlength=E) for r in routes()
        )
        assert found[f"counts of router {layer}"].tolist() == taken.tolist()


@pytest.mark.parametrize("options", [{}, FULL], ids=["plain", "full"])
def test_replayed_tokens_may_be_left_out_of_the_counts(options: dict[str, Any]) -> None:
    """Two holes in each sequence, which the router chooses natively, and a full set of routes."""
    captured = torch.ones(LENGTH, dtype=torch.bool)
    captured[[1, 4]] = False
    model = make_model(**options)
    with_all = replayed(model, routes(captured))

    found = replayed(model, routes(captured), count_replayed=False)
    none = replayed(model, count_replayed=False)

    assert with_all["counts of router 0"].sum() == B * LENGTH * K
    assert found["counts of router 0"].sum() == B * 2 * K
    assert (found["counts of router 0"] <= with_all["counts of router 0"]).all()
    assert not none["counts of router 0"].any()
    gradients = {n: v for n, v in with_all.items() if n.startswith("gradient")}
    assert far(gradients, {n: found[n] for n in gradients}, tolerance=0) == []


def test_counts_go_on_from_what_is_there() -> None:
    model = make_model()
    for router in routers(model):
        router.local_tokens_per_expert.fill_(7)

    found = replayed(model, count_replayed=False)

    assert found["counts of router 0"].tolist() == [7] * E


@HELD
def test_a_mask_of_the_call_goes_before_the_held_one() -> None:
    model, mask = make_model(), batch(TOTAL, 3)[2]
    loss_of(model, TOTAL, padding_mask=mask).backward()

    assert far(take(model), recorded(model, padding_mask=mask), tolerance=0) == []


@HELD
def test_a_held_mask_is_for_one_forward_and_not_for_later() -> None:
    model = make_model()
    loss_of(model, TOTAL).backward()
    expected = take(model)

    with contextlib.suppress(ZeroDivisionError), recording(model) as record:
        record.load(model, LAYOUT)
        raise ZeroDivisionError
    loss_of(model, TOTAL).backward()

    assert far(expected, take(model), tolerance=0) == []
    assert mask_tracker.calls_of(model).next_mask is None


@HELD
def test_a_model_around_the_gpt_model_takes_no_argument() -> None:
    """A vision-language model, say, whose forward knows no mask."""

    inner = make_model(**FULL)
    expected = recorded(inner)

    found = recorded(Around(inner))

    assert [*expected.values()][-1].tolist() == [*found.values()][-1].tolist()
    assert all(map(torch.equal, expected.values(), found.values()))


@pytest.mark.parametrize("losses", [True, False])
def test_a_model_that_takes_no_mask_is_told_once(
    losses: bool, warnings: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No GPTModel in it, or the patch is not in place: not silently."""
    none = {"moe_z_loss_coeff": None, "moe_router_enable_expert_bias": False} | loss("none", 0.0)
    model = Around(make_model(**({} if losses else none)))
    monkeypatch.setattr(mask_tracker, "models_with_masks", lambda chunk: [])

    for _ in range(2):
        with recording(model) as record:
            loss_of(model, TOTAL, **record.load(model, LAYOUT))

    assert ["Around takes no padding_mask" in line for line in warnings()] == [True] * losses


@pytest.mark.skipif(not TAKES_MASK, reason="before 0.16 the mask is carried there, too")
def test_a_schedule_that_loses_the_mask_is_told_once(warnings: Callable[[], list[str]]) -> None:
    model = make_model()
    model.config.overlap_moe_expert_parallel_comm = True

    for _ in range(2):
        with recording(model) as record:
            loss_of(model, TOTAL, **record.load(model, LAYOUT))

    assert ["loses padding_mask in Megatron's combined 1F1B" in line for line in warnings()] == [
        True
    ]


@HELD
def test_a_layout_that_does_not_fit_the_batch_is_refused_at_the_forward() -> None:
    model = make_model()

    def forward() -> None:
        with recording(model) as record:
            record.load(model, TokenLayout.padded([LENGTH] * B, TOTAL - 1))
            loss_of(model, TOTAL)

    with pytest.raises(RouteError, match="8 positions x 3 sequences; expected 7 x 3"):
        forward()


@HELD
def test_a_layout_of_another_shape_with_as_many_tokens_is_refused() -> None:
    model = make_model()

    def forward() -> None:
        with recording(model) as record:
            record.load(model, TokenLayout.padded([B] * TOTAL, B))
            loss_of(model, TOTAL)

    with pytest.raises(
        LayoutError, match=r"padding_mask has the shape \[8, 3\]: expected \[3, 8\]"
    ):
        forward()
