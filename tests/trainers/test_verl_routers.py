"""verl's routing replay: every release of it on Megatron-core from the oldest to the newest.

Each cell has a process of its own, in which everything is asked; verl's modules are imported as
they are. The passes of a training step run in verl's own worker and engine, in 0.7.0 in its actor
(see `helpers.verl_engine`).
"""

from collections.abc import Iterator
from typing import Any

import pytest
from helpers import verl_engine

VERL = ("0.7.0", "0.7.1", "0.8.0", "0.9.1")
MEGATRON = ("0.12.1", "0.14.0", "0.16.1", "0.19.2")
CELLS = [(verl, megatron) for verl in VERL for megatron in MEGATRON]

ERRORS: dict[tuple[str, str], dict[str, str]] = {}
"""Cell -> question -> the error that it gives; all else passes."""

ALL_OF_R2 = {
    "the batch has what the routers did": True,
    "without replay they would differ": True,
    "the update uses it": True,
    "calls in the update": [2],
    "another model is as before": True,
}
ALL_OF_R3 = {
    "captured rows": True,
    "the others have K experts": True,
    "the others are native": True,
    "all calls agree": True,
}


@pytest.fixture(scope="module")
def ask() -> Iterator[Any]:
    with verl_engine.started(CELLS) as asked:
        yield asked


@pytest.fixture(params=CELLS, ids="-".join)
def answers(request: pytest.FixtureRequest, ask: Any) -> Any:
    found = dict(ask(*request.param))
    for question, error in ERRORS.get(request.param, {}).items():
        assert found.pop(question) == error
    return found


def test_its_names_record_and_replay(answers: Any) -> None:
    both = [True, True]
    replayed = {"recorded": both, "REPLAY_FORWARD": both, "REPLAY_BACKWARD": both}

    assert answers["names"] == {**replayed, "listed": 2, "unchanged": True}


def test_rows_that_are_not_to_be_replayed_are_native(answers: Any) -> None:
    assert answers["masked_rows"] == [True] * 4


def test_routers_of_a_stage_are_by_layer_and_refused_for_two_models(answers: Any) -> None:
    """Dense layers in front, an MTP block behind; routes of all layers, and of the MoE layers."""
    found = dict(answers["helpers_of_a_stage"])
    refusal = found.pop("two models")

    both = [True, True]
    expected = {"one model": [[3, 0], [4, 0]], "listed": 3, "4 layers": both, "2 layers": both}
    assert found == {**expected, "merged": True, "of a model without replay": 0}
    assert refusal.startswith("RouteError")
    assert "{3: 2, 4: 2}" in refusal


def test_r2_the_update_uses_what_the_old_log_prob_pass_recorded(answers: Any) -> None:
    """With recompute, several microbatches, shuffled mini-batches and other router weights."""
    assert answers["r2"] == ALL_OF_R2


def test_r3_both_passes_use_the_rollouts_routes(answers: Any) -> None:
    """Zeros are what verl fills in where nothing was captured: such rows route natively."""
    found = {"log probs": ALL_OF_R3, "update": ALL_OF_R3, "calls": [[1], [2]]}

    assert answers["r3"] == {**found, "the batch keeps the rollout's": True}


def test_a_second_model_with_replay_leaves_the_first_one_alone(answers: Any) -> None:
    assert answers["r3_beside_another"] == {"first": ALL_OF_R3, "second": ALL_OF_R3}
