"""Other code that patches the same places of a real Megatron, and patches of ours that fail."""

import pytest
from helpers import interpreters
from programs.patching import ledger

pytestmark = pytest.mark.mechanism

ON = {"REPLAY_PATCH": "1"}


def test_competing_wrappers_both_run_once() -> None:
    """Case 43: A, then B, then A again."""
    assert interpreters.run(ledger.competing_wrapper, bed=True, **ON) == [
        "active",
        [[1, 0, 0, 1]],
        1,
    ]


def test_an_overwritten_patch_is_lost_and_replay_is_refused_until_it_is_back() -> None:
    lost, error, again, reason, routing_map, calls = interpreters.run(
        ledger.overwritten, bed=True, **ON
    )

    assert lost == "lost"
    assert "patch router_objects is lost: replaced by other code: " in error
    assert "TopKRouter.forward" in error
    assert again == "active"
    assert "reinstalled, because other code had replaced " in reason
    assert (routing_map, calls) == ([[1, 0, 0, 1]], 1)


def test_what_cannot_be_given_back_is_reported_and_harmless() -> None:
    active, problems, calls = interpreters.run(ledger.kept_by_a_stranger, bed=True, **ON)

    assert not active
    assert [p for p in problems if p.startswith("could not be restored: ")] == problems
    assert any("TopKRouter.forward" in p for p in problems)
    assert calls == 1


@pytest.mark.exhaustive
def test_ours_is_taken_out_of_a_wrapper_of_other_code() -> None:
    assert interpreters.run(ledger.taken_out_of_a_wrapper, bed=True, **ON) == [False, [], 1]


@pytest.mark.exhaustive
def test_patches_come_back_around_a_forward_of_any_signature() -> None:
    assert interpreters.run(ledger.any_signature, bed=True, **ON) == [[], []]


def test_a_patch_that_raises_leaves_the_import_and_the_other_patches_alone() -> None:
    failed, guard, problems, error = interpreters.run(ledger.patch_that_raises, bed=True)

    assert failed == ["router_objects"]
    assert guard == "active"
    assert problems == ["patch router_objects is failed: RuntimeError: a distinctive text"]
    assert "a distinctive text" in error


@pytest.mark.exhaustive
def test_a_megatron_module_that_fails_to_import_and_then_succeeds() -> None:
    first, states, active = interpreters.run(ledger.import_that_fails_first, bed=True, **ON)

    assert first == "not yet"
    assert set(states) <= {"active", "not needed"}
    assert active


@pytest.mark.exhaustive
def test_a_strangers_hook_that_raises_does_not_cost_us_ours() -> None:
    """wrapt forgets all hooks of a module whose first hook raises."""
    first, failed, active, states = interpreters.run(ledger.hook_that_raises, bed=True, **ON)

    assert (first, failed) == ("a stranger's hook", 1)
    assert active
    assert set(states) <= {"active", "not needed"}


def test_a_signature_that_we_have_never_seen_is_passed_on() -> None:
    """A later release, or a fork, with new arguments everywhere: the values arrive."""
    seen, assigned, active = interpreters.run(ledger.unknown_signature, bed=True)

    assert seen == {"config": 1, "init": 2, "forward": 3}
    assert (assigned, active) == (2, True)


@pytest.mark.exhaustive
def test_deactivation_reaches_modules_that_were_imported_later() -> None:
    assert interpreters.run(ledger.left_in_later_modules, bed=True, **ON) == []


@pytest.mark.exhaustive
def test_a_forward_that_is_overwritten_after_the_model_was_built_refuses_to_start() -> None:
    errors, untouched = interpreters.run(
        ledger.overwritten_after_the_model_was_built, bed=True, **ON
    )

    assert ["patch router_objects is lost" in error for error in errors] == [True, True]
    assert untouched


def test_a_strangers_wrapper_around_the_topk_function_runs_too() -> None:
    assert interpreters.run(ledger.topk_in_a_wrapper, bed=True) == [[[1, 0, 0, 1]], 1]


@pytest.mark.exhaustive
def test_a_topk_function_that_cannot_be_reached_is_a_failed_patch_where_it_matters() -> None:
    error, state = interpreters.run(ledger.topk_out_of_reach, bed=True)

    if state == "not needed":  # the release passes the replay object on
        assert error is None
    else:
        assert state == "failed"
        assert "is no plain Python function" in error
