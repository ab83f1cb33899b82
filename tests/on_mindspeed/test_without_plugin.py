"""What MindSpeed does to others: the stand-in does it, and so does the real one."""

from typing import Any

import pytest
from helpers import mindspeed_processes
from helpers.mindspeed_processes import ask

SCRIPT = "without_plugin.py"
KEPT = {name: [True, "absent"] for name in ("TransformerConfig", "MLATransformerConfig")}
DROPPED = {name: [False, False] for name in KEPT}


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    found: dict[str, Any] = ask("stand-in", SCRIPT)
    return found


def test_a_class_attribute_makes_it_drop_the_users_true(answers: dict[str, Any]) -> None:
    """Case 3."""
    assert answers["no attribute"] == KEPT
    assert answers["class attribute"] == DROPPED


def test_a_repatch_discards_what_others_put_on_top(answers: dict[str, Any]) -> None:
    """Case 87: called at once, after an apply, after a repatch; and of a helper that MindSpeed
    replaces while a feature is on."""
    assert answers["wrapped __init__"] == [True, True, False]
    # MindSpeed's; a stranger's; after a repatch; with the feature off, when it is the release's.
    assert answers["replaced helper"] == [False, False, True, False, False, True]


def test_a_place_can_be_replaced_once_and_wrapped_often(answers: dict[str, Any]) -> None:
    """Case 88."""
    assert answers["registered twice"] == ["accepted", "RuntimeError", None]


def test_every_config_is_of_a_class_of_its_own(answers: dict[str, Any]) -> None:
    """D2."""
    found = {name: answers[name] for name in ("same class", "an instance", "deepcopy")}
    assert found == {"same class": False, "an instance": True, "deepcopy": True}
    assert answers["replace"] == "AttributeError"
    assert answers["pickle"] == "PicklingError"


def test_its_arguments_reach_every_config_unless_the_class_has_the_name(
    answers: dict[str, Any],
) -> None:
    assert answers["full arguments"] == [True, False, False]


def test_the_unaligned_pipeline_leaves_layer_numbers_wrong(answers: dict[str, Any]) -> None:
    """Case 8: layers, the offset in use, the offset it should be, on either stage."""
    assert answers["unaligned"] == [[3, 0, 0], [1, 2, 3]]
    assert answers["unaligned, vp_stage"] == "TypeError"


def test_branches_differ_in_subclasses_and_mla() -> None:
    with_fields = ask("stand-in init_subclass", SCRIPT)
    forgetting = ask("stand-in no_mla", SCRIPT)

    assert ask("stand-in", SCRIPT)["subclass"] == ["AttributeError", "TypeError"]
    assert with_fields["subclass"] == ["absent", "TypeError"]
    assert forgetting["no attribute"]["MLATransformerConfig"] == ["TypeError", "AttributeError"]


@pytest.mark.skipif(mindspeed_processes.REAL is None, reason="no MINDSPEED_PATH")
def test_the_stand_in_answers_as_the_real_one() -> None:
    real = ask("real", SCRIPT)
    if len(real) == 1:
        pytest.skip("this MindSpeed is 2.1, which the stand-in does not imitate")

    assert ask(" ".join(["stand-in", *real["branch"]]), SCRIPT) == real
