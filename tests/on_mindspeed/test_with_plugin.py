"""The plugin beside MindSpeed, in each order, and through all that MindSpeed does later."""

from typing import Any

import pytest
from helpers.mindspeed_processes import ask

ORDERS = ("hook", "before", "after")
STAGES = ("start", "repatch", "second repatch", "remove", "apply", "repatch after all")
CLASSES = ("TransformerConfig", "MLATransformerConfig", "made before", "made after")

Answers = dict[str, Any]


@pytest.fixture(params=ORDERS)
def answers(request: pytest.FixtureRequest, mindspeed: str) -> Answers:
    order = request.param
    found: Answers = ask(mindspeed, "with_plugin.py", order, plugin=order != "after")
    return found


@pytest.fixture(params=STAGES)
def state(request: pytest.FixtureRequest, answers: Answers) -> Answers:
    """What is found right after MindSpeed has done this."""
    stage = request.param
    if stage not in answers["stages"]:
        pytest.skip("this MindSpeed (2.1) has no repatch")
    found: Answers = answers["stages"][stage]
    return found


def later(answers: Answers, name: str) -> Any:
    if len(answers) == 2:
        pytest.skip("this MindSpeed (2.1) has no repatch")
    return answers[name]


def test_every_patch_is_in_place(state: Answers) -> None:
    assert state["status"] == []


@pytest.mark.parametrize("cls", CLASSES)
def test_every_config_keeps_the_flags(state: Answers, cls: str) -> None:
    """Cases 1, 3 and 13: as given, as not given, on the class."""
    assert state["flags"][cls] == [[True] * 3, [False] * 3, [False] * 3]


@pytest.mark.parametrize("cls", CLASSES)
def test_every_copy_of_a_config_keeps_the_flag(state: Answers, cls: str) -> None:
    """D2."""
    expected = {"deepcopy": True, "replace": True, "replace the flag": False, "pickle": True}
    assert state["copies"][cls] == expected


@pytest.mark.parametrize("router", ["oldest router", "new router"])
def test_routers_record_and_replay(state: Answers, router: str) -> None:
    assert state[router] == {"replays": True, "records": True, "differ": True}


def test_who_has_bound_the_topk_function_sees_ours(state: Answers) -> None:
    """Case 90."""
    assert state["importer"] is True


@pytest.mark.parametrize("stage", ["start", "repatch", "second repatch", "repatch after all"])
def test_mindspeeds_own_wrapper_still_works(answers: Answers, stage: str) -> None:
    """It keeps an argument that Megatron does not know."""
    assert later(answers, "stages")[stage]["unknown argument"] == 5


@pytest.mark.parametrize("cls", CLASSES[:2])
def test_the_flag_among_mindspeeds_arguments(answers: Answers, cls: str) -> None:
    assert later(answers, "full arguments")[cls] == {
        "True": True,
        "True, config False": False,
        "False": False,
        "'true'": True,
        "'false'": False,
    }


def test_strings_in_a_repatch_do_what_they_do_without_us(answers: Answers, mindspeed: str) -> None:
    """Case 89."""
    found = later(answers, "strings")

    assert found == {"config": ask(mindspeed, "without_plugin.py")["strings"], "status": []}


def test_mindspeeds_helper_is_what_is_called_below_ours(answers: Answers) -> None:
    """Cases 7, 8 and 23: its helper takes only the config, and knows only its own stage."""
    assert later(answers, "unaligned") == {
        "layers": [3, 1],
        "with vp_stage": [3, 1],
        "of rank 1": [1, 1],
        "status": [],
        "off": [2, 2],
        "of rank 1, off": [2, 2],
    }


def test_replay_in_mindspeeds_own_routing(answers: Answers) -> None:
    if "tp_extend_ep" not in answers:
        pytest.skip("of core 0.12 and 0.13")
    right = {"replays": True, "records": True, "differ": True}

    assert answers["tp_extend_ep"] == {
        "is MindSpeed's": True,
        "on": right,
        "status": [],
        "off": right,
    }


def test_a_trainers_class_named_as_its_base_is_its_own(answers: Answers) -> None:
    expected = {"deepcopy": True, "pickle": True, "no argument": "TypeError"}
    assert answers["trainer's own"] == expected


def test_deactivated_nothing_of_ours_comes_back(answers: Answers) -> None:
    """Also what MindSpeed had found in a place when it came, and puts there at each repatch."""
    assert later(answers, "deactivated") == []
