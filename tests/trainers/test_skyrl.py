"""SkyRL 0.3.0's routing replay on real Megatron models: whose experts does each token get?

All of SkyRL is the real release, with its `__init__`s; `helpers.skyrl_trainer` says what it is
given. What is compared with is plain Python (`helpers.skyrl_trainer.experts`, `unpacked_rows`,
`packed_rows`) and the router's own weights for tokens without a route.
"""

import functools
from typing import Any

import pytest
from helpers import trainers

SKYRL = {"skyrl": "0.3.0"}
CELLS = ("0.14.0", "0.16.1", "0.19.2")
BOTH = {("schedules", "0.19.2"), ("ranks", "0.16.1")}
"""Where one process runs without our patches first. Elsewhere they are there from the start."""
RIGHT = (
    "unpacked",
    "packed",
    "uncaptured",
    "forward_only",
    "padding",
    "dense_and_mtp",
    "dense_and_mtp_in_training",
    "some_without_routes",
    "left_over",
    "same_batch_again",
    "no_routes_at_all",
    "called_directly",
    "called_directly_without_recompute",
)
NO_LABELS = "AttributeError: 'NoneType' object has no attribute 'clone'"
NO_SWITCH = (
    "RuntimeError: Cannot disable native MTP loss: megatron's multi_token_prediction module no "
    "longer exposes 'process_mtp_loss'."
)
OF_MEGATRON = {
    ("dense_and_mtp", "0.14.0"): (
        "AssertionError: multi token prediction + sequence packing is not yet supported."
    ),
    ("dense_and_mtp", "0.16.1"): NO_LABELS,
    ("dense_and_mtp_in_training", "0.14.0"): NO_SWITCH,
    ("dense_and_mtp_in_training", "0.16.1"): NO_SWITCH,
}
"""SkyRL runs no model with an MTP block on a Megatron before 0.17: these are its own errors."""
CANNOT = {
    "0.12.1": "cannot import name 'get_moe_layer_wise_logging_tracker' from "
    "'megatron.core.transformer.moe.moe_utils'",
    "0.13.1": "cannot import name 'unwrap_model' from 'megatron.core.utils'",
}
"""Releases on which SkyRL's model wrapper cannot be imported, and why."""

pytestmark = pytest.mark.mechanism


@functools.cache
def ask(name: str, megatron: str) -> Any:
    """What the cases say: [with the plugin], or [without it, activated afterwards]."""
    both = (name, megatron) in BOTH
    code = f"from helpers import skyrl_cases; skyrl_cases.{name}(both={both})"
    return trainers.run(code, megatron, SKYRL, plugin=not both)


@functools.cache
def ask_data() -> Any:
    code = "from helpers import skyrl_data; skyrl_data.data()"
    return trainers.run(code, "0.16.1", SKYRL, plugin=False)


# --- without the plugin ---------------------------------------------------------------------------


def test_without_the_plugin_tokens_get_the_experts_of_others() -> None:
    """What the patches are for."""
    found = ask("schedules", "0.19.2")[0]

    assert found["packed"] == []  # the harness itself is right
    assert "layer 1, backward False, (1, 0): [4, 7], not [2, 5]" in found["unpacked"]
    assert "layer 1, backward False, (0, 4): [0], not [0, 6]" in found["uncaptured"]
    assert "layer 2, backward False, (0, 0): [1, 7], not [1, 6]" in found["dense_and_mtp"]
    assert "an MTP block is replayed" in found["dense_and_mtp_in_training"]
    assert found["some_without_routes"] == ["IndexError: pop from empty list"]
    assert "after a schedule: 2 queued, RouterReplayAction.REPLAY_BACKWARD" in found["left_over"]
    assert "after a failed one: 4 queued, RouterReplayAction.REPLAY_BACKWARD" in found["left_over"]
    assert found["no_routes_at_all"] == ["not a word"]
    assert len(found["called_directly"]) > 2
    assert any(what.startswith("counts") for what in found["padding"])
    assert "_repeating: taken" in found["bad_routes"]


def test_without_the_plugin_two_ranks_get_other_rows_or_fail() -> None:
    found = ask("ranks", "0.16.1")[0]

    for name in ("sequence_parallel_off", "sequence_parallel_on", "sequence_parallel_unpacked"):
        assert found[name]
        assert all("allgather: invalid tensor size" in what for what in found[name])
    assert "rank 0: (1, 0): [], not [2, 5]" in found["several_in_a_row"]
    assert found["virtual_stages"][0].startswith("AssertionError: vp_stage must be provided")


# --- with it --------------------------------------------------------------------------------------


@pytest.mark.parametrize("megatron", CELLS)
@pytest.mark.parametrize("case", RIGHT)
def test_every_token_gets_its_own_experts(case: str, megatron: str) -> None:
    found = ask("schedules", megatron)[-1][case]

    theirs = OF_MEGATRON.get((case, megatron))
    assert found == ([theirs] if theirs else [])


@pytest.mark.parametrize("megatron", CELLS)
def test_what_cannot_be_right_is_refused(megatron: str) -> None:
    found = ask("schedules", megatron)[-1]

    [two_models] = found["called_directly_for_two_models"]
    assert two_models.startswith("RouteError")
    assert "(not one for a layer: {1: 2, 2: 2})" in two_models
    out_of_range, repeating, layers = found["bad_routes"]
    assert out_of_range.startswith("RouteError: SkyRL's rollout_expert_indices, sequence 1")
    assert "an id is twice in one row" in repeating
    assert layers.startswith("RouteError: SkyRL's rollout_expert_indices hold 1 layers")


@pytest.mark.parametrize("megatron", CELLS[1:])
def test_every_rank_and_chunk_replays_its_own_rows_and_layers(megatron: str) -> None:
    found = dict(ask("ranks", megatron)[-1])
    refused = found.pop("virtual_stage_called_directly")

    assert {name: what for name, what in found.items() if what} == {}
    assert len(refused) == 2
    assert all("RouteError" in what and "virtual pipeline stages" in what for what in refused)


@pytest.mark.parametrize("megatron", CANNOT)
def test_releases_on_which_skyrl_itself_cannot_run(megatron: str) -> None:
    code = "from helpers import skyrl_trainer; skyrl_trainer.import_error()"

    assert trainers.run(code, megatron, SKYRL).startswith(CANNOT[megatron])


# --- from the rollout to a batch, and the expert bias ---------------------------------------------


def test_without_the_patches_routes_are_lost_or_stay_with_a_rejected_sample() -> None:
    found, _ = ask_data()

    assert found["reordered_and_split"] == []  # SkyRL's own batch is right
    assert found["filtered"] == ["no routes"]
    assert [what.split(" ")[0] for what in found["replaced"]] == ["place", "place"]
    names = ("one_sample_without", "no_sample_with", "masked_sample_without", "field_lost")
    assert [found[name] for name in names] == [["taken"]] * 4
    assert found["environment"] == ["REPLAY_PATCH", "REPLAY_PATCH_LOG"]


def test_routes_follow_their_sample_and_none_may_lack_them() -> None:
    _, found = ask_data()

    for name in ("reordered_and_split", "filtered", "replaced", "environment"):
        assert found[name] == []
    assert found["masked_sample_without"] == ["taken"]
    refused = {"one_sample_without": 1, "no_sample_with": 0, "field_lost": 0}
    for name, sample in refused.items():
        [what] = found[name]
        assert what.startswith(f"RouteError: SkyRL: sample {sample} has no rollout_expert_indices")


@pytest.mark.parametrize("megatron", CELLS[1:])
def test_its_correction_of_the_expert_bias_and_ours_in_both_orders(megatron: str) -> None:
    """Also on a Megatron that is right by itself, where SkyRL's alone allocates T x T x E."""
    code = "from helpers import skyrl_bias; skyrl_bias.bias()"
    found = trainers.run(code, megatron, {}, plugin=False)

    both = ["right", "right"]
    assert found["release, alone"] == both
    assert found["release, ours first"] == [*both, "active", "active"]
    assert found["release, theirs first"] == [*both, "not needed", "active"]
    assert all("doesn't match the broadcast shape" in what for what in found["main, alone"])
    assert found["main, ours first"] == [*both, "not needed", "active"]
    # Too late to be undone, but neither error is silent.
    assert found["main, theirs first"][2:] == ["failed", "active"]
