"""Training steps in verl's Megatron engine, without the plugin and with it.

What each test asks is in `helpers.verl_questions`; that R2 and R3 work in every cell of releases
is shown by `test_verl_routers.py`. Here the first tests show what goes wrong without the plugin.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers import verl_engine

PADDED = "routing replay with padded sequences (bshd)"
RECORDED = {"the batch has what the routers did": True, "the update uses it": True}
REPLAYED = {"captured rows": True, "the others have K experts": True, "the others are native": True}
ALL = ("0.7.0", "0.7.1", "0.8.0", "0.9.1")


OLD = ("0.7.0", verl_engine.OF_0_7_0, False)
PATCHED = [("0.9.1", "0.12.1", False), OLD, ("0.7.0", "0.16.1", False), ("0.9.1", "0.16.1", False)]


@pytest.fixture(scope="module")
def cells() -> Iterator[Any]:
    every = [(verl, verl_engine.IN_DEPTH, plugin) for verl in ALL for plugin in (False, True)]
    with verl_engine.started(list(dict.fromkeys([*PATCHED, *every]))) as asked:
        yield asked


@pytest.fixture
def ask(cells: Any) -> Callable[[str, bool], Any]:
    def of(verl: str, plugin: bool) -> Any:
        cell = (verl, verl_engine.IN_DEPTH, plugin)
        return cells(*(OLD if cell[::2] == OLD[::2] else cell))

    return of


def part(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    return {key: found[key] for key in expected}


# --- without the plugin ------------------------------------------------------------------------


def test_without_the_plugin_its_patch_fails_or_replaces_the_routing(cells: Any) -> None:
    """A router with an auxiliary loss; the last release says that it knows Megatron 0.12."""
    found = [cells(*cell)["without_the_plugin"] for cell in PATCHED]

    assert found == [
        "NameError: name 'compute_routing_scores_for_aux_loss' is not defined",
        "AttributeError: 'TopKRouter' object has no attribute '_apply_global_aux_loss'",
        "TypeError: patched_routing() got an unexpected keyword argument 'padding_mask'",
        "replaced",
    ]


@pytest.mark.parametrize("verl", ["0.8.0", "0.9.1"])
def test_without_the_plugin_each_layer_waits_for_the_device(ask: Any, verl: str) -> None:
    """Its dispatcher counts assignments on the host, replaying or not."""
    assert ask(verl, False)["waits_for_the_device"] == [1, 1]


@pytest.mark.parametrize("verl", ["0.7.0", "0.8.0", "0.9.1"])
def test_without_the_plugin_rows_that_were_not_captured_go_to_expert_0(ask: Any, verl: str) -> None:
    """In both passes: a row of zeros becomes one expert where the dispatcher counts K."""
    found = ask(verl, False)["r3"]

    for one in (found["log probs"], found["update"]):
        assert part(one, REPLAYED) == {
            "captured rows": True,
            "the others have K experts": False,
            "the others are native": False,
        }


@pytest.mark.parametrize("verl", ["0.7.0", "0.8.0", "0.9.1"])
def test_without_the_plugin_a_second_model_makes_the_first_one_native(ask: Any, verl: str) -> None:
    found = ask(verl, False)["r3_beside_another"]

    assert [found[name]["captured rows"] for name in ("first", "second")] == [False, True]


def test_without_the_plugin_the_engine_of_0_7_1_can_neither_record_nor_replay(ask: Any) -> None:
    found = ask("0.7.1", False)

    assert found["after_an_exception"] == "ValueError: too many values to unpack (expected 2)"
    assert found["r3"].startswith("RuntimeError: The expanded size of the tensor")


@pytest.mark.parametrize("verl", ["0.7.0", "0.8.0"])
def test_without_the_plugin_ids_wrap_above_256_experts(ask: Any, verl: str) -> None:
    found = ask(verl, False)["r2_with_many_experts"]

    assert part(found, RECORDED) == dict.fromkeys(RECORDED, False)


@pytest.mark.parametrize("verl", ["0.7.0", "0.8.0", "0.9.1"])
def test_without_the_plugin_microbatches_of_a_failed_pass_come_first(ask: Any, verl: str) -> None:
    found = ask(verl, False)["after_an_exception"]

    assert "6" in found
    assert "batch" in found.lower()


@pytest.mark.parametrize("verl", ["0.8.0", "0.9.1"])
def test_without_the_plugin_padded_sequences_get_each_others_rows(ask: Any, verl: str) -> None:
    assert ask(verl, False)["r2_padded"] == {"first sequence": False}


@pytest.mark.parametrize("verl", ["0.7.0", "0.8.0"])
def test_without_the_plugin_a_decoder_built_twice_cannot_record(ask: Any, verl: str) -> None:
    found = ask(verl, False)["r2_with_a_decoder_built_twice"]

    assert found == "AttributeError: 'NoneType' object has no attribute 'to'"


def test_without_the_plugin_r2_settings_that_cannot_work_are_fine(ask: Any) -> None:
    """From 0.9 on verl itself refuses one of them."""
    fine = {"R3": "fine", "R2": "fine", "R2, bypass": "fine", "R2, rollout": "fine"}

    assert ask("0.8.0", False)["settings"] == fine
    new = dict(ask("0.9.1", False)["settings"])
    assert new.pop("R2, bypass").startswith("ValueError: router_replay.mode='R2' requires")
    assert new.items() <= fine.items()


def test_without_the_plugin_r2_of_0_9_replays_the_rollouts_routes(ask: Any) -> None:
    assert ask("0.9.1", False)["r2_with_the_rollouts"] == {"captured rows": True}


# --- with the plugin ---------------------------------------------------------------------------


@pytest.fixture(params=ALL)
def answers(request: pytest.FixtureRequest, ask: Any) -> Any:
    return ask(request.param, True)


def test_no_layer_waits_for_the_device(answers: Any) -> None:
    assert answers["waits_for_the_device"] == [0, 0]


def test_a_decoder_built_twice_records_and_replays(answers: Any) -> None:
    found = answers["r2_with_a_decoder_built_twice"]

    assert part(found, RECORDED) == RECORDED


def test_ids_of_more_than_256_experts_are_kept(answers: Any) -> None:
    assert part(answers["r2_with_many_experts"], RECORDED) == RECORDED


def test_a_failed_pass_leaves_nothing_to_the_next(answers: Any) -> None:
    died = "MemoryError: no memory"

    assert answers["after_an_exception"] == {"recording": died, "update": died, "then": True}


def test_an_update_without_a_recording_is_refused(answers: Any) -> None:
    """By verl, whatever the words."""
    found = answers["r2_without_recording"]

    assert found.partition(":")[0] in ("KeyError", "AttributeError", "RuntimeError")


def test_r2_settings_that_cannot_work_are_refused(answers: Any) -> None:
    found = answers["settings"]

    assert [found["R2"], found["R3"]] == ["fine", "fine"]
    for name, setting in (("R2, bypass", "bypass_mode"), ("R2, rollout", "routing_replay")):
        assert found[name].startswith("SettingsError: verl: router_replay.mode=R2 with ")
        assert f"{setting}=True" in found[name]


@pytest.mark.parametrize("verl", ALL[1:])
def test_padded_sequences_are_refused(ask: Any, verl: str) -> None:
    assert PADDED in ask(verl, True)["r2_padded"]


@pytest.mark.parametrize("verl", ALL[1:])
def test_with_one_expert_a_row_of_zeros_is_a_route(ask: Any, verl: str) -> None:
    """A rollout with the plugin marks with -1 what it has no route for; a warning says so."""
    found = ask(verl, True)["one_expert"]

    assert found == {
        "captured rows": True,
        "a row of -1 is native": True,
        "a row of zeros": [[[0]], [[0]]],
    }
