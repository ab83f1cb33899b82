"""Activation around a real Megatron: what comes first, what is missing, what fails."""

from importlib.util import find_spec

import megatron.core
import pytest
from helpers import interpreters
from programs.patching import megatron_activation

from replay_patch.patching.registry import vital_names

pytestmark = pytest.mark.mechanism


def test_import_torch_imports_no_megatron() -> None:
    assert interpreters.run(megatron_activation.loaded_by_torch, REPLAY_PATCH="1") == []


@pytest.mark.parametrize("first", ["torch", "megatron"])
def test_torch_or_megatron_first(first: str) -> None:
    active, trigger, states = interpreters.run(megatron_activation.first, first, REPLAY_PATCH="1")

    assert (active, trigger) == (True, "torch.backends")
    assert set(states) <= {"active", "not needed"}


def test_megatron_already_imported() -> None:
    active, trigger, states = interpreters.run(megatron_activation.already_imported, bed=True)

    assert (active, trigger) == (True, "activate()")
    assert set(states) <= {"active", "not needed"}


def test_every_patch_is_decided_once_a_model_class_is_imported() -> None:
    import replay_patch

    assert {p.state for p in replay_patch.status().patches} <= {"active", "not needed"}


def test_deactivation_gives_every_object_back() -> None:
    changed, left = interpreters.run(megatron_activation.given_back, bed=True)

    assert "megatron.core.transformer.moe.router:TopKRouter" in changed
    assert left == []


def test_without_the_plugin_megatron_is_untouched() -> None:
    field, module, patches = interpreters.run(megatron_activation.untouched, bed=True)

    assert not field
    assert module == ("megatron/core" in str(find_spec_of_real_router_replay()))
    assert not patches


def find_spec_of_real_router_replay() -> str | None:
    """The file of Megatron's own module, if this release has one."""
    spec = find_spec("megatron.core.transformer.moe.router_replay")
    return None if spec is None else spec.origin


def test_the_plugin_survives_a_megatron_that_cannot_be_imported() -> None:
    """Case 12: without triton `import megatron.core` fails from 0.18 on."""
    error, *state = interpreters.run(megatron_activation.without_triton, REPLAY_PATCH="1")

    assert error in (None, "No module named 'triton'")
    assert state == [True, True, []]


@pytest.mark.parametrize("name", ["0.9", "0.100.0"])
def test_the_version_string_decides_nothing(name: str) -> None:
    """Case D6."""
    import replay_patch

    expected = {p.name: p.state for p in replay_patch.status().patches}

    assert (
        interpreters.run(megatron_activation.states, name, bed=True, REPLAY_PATCH="1") == expected
    )


def test_names_bound_by_value_are_patched_too() -> None:
    """Case 90: router.py and trainers import the top-k function by name."""
    assert interpreters.run(megatron_activation.bound_by_value, bed=True) == [True, True, True]


def test_a_release_whose_seam_is_missing_fails_where_replay_is_used() -> None:
    errors, plain = interpreters.run(megatron_activation.missing_seam, bed=True)

    assert len(errors) == 2
    for error in errors:
        assert f"megatron-core {megatron.core.__version__}" in error
        assert "supports megatron-core 0.12.0 and later" in error
    assert plain is False


@pytest.mark.parametrize("skip", vital_names())
def test_a_skipped_patch_is_refused_where_it_is_needed(skip: str) -> None:
    import replay_patch

    needed = {p.name: p.state for p in replay_patch.status().patches}[skip] == "active"

    error = interpreters.run(
        megatron_activation.refusal, bed=True, REPLAY_PATCH="1", REPLAY_PATCH_SKIP=skip
    )

    if needed:
        assert f"patch {skip} is skipped: named in REPLAY_PATCH_SKIP" in error
    else:
        assert error is None
