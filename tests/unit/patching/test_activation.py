"""Activation as a process meets it, each in a fresh interpreter; without Megatron."""

import importlib.metadata
from pathlib import Path

import pytest
from helpers.interpreters import python, run
from programs.patching import activation


@pytest.mark.parametrize("env", [{}, {"REPLAY_PATCH": "0"}, {"REPLAY_PATCH": "off"}])
def test_off_loads_nothing_but_the_entry_module(env: dict[str, str]) -> None:
    assert run(activation.loaded, "replay_patch", "wrapt", "megatron", **env) == [
        "replay_patch",
        "replay_patch.autoload",
    ]


def test_off_registers_nothing() -> None:
    assert run(activation.new_finders) == []


def test_torch_activates_it() -> None:
    assert run(activation.status, REPLAY_PATCH="1") == [True, True, "torch.backends"]


def test_activation_imports_no_megatron_and_touches_no_torch() -> None:
    assert run(activation.loaded_by_auto, REPLAY_PATCH="1") == []


def test_without_torchs_autoload_it_is_off_until_asked() -> None:
    off = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "REPLAY_PATCH": "1"}

    assert run(activation.status, **off) == [True, False, None]
    assert run(activation.status, "auto", **off) == [True, True, "replay_patch.auto"]


def test_replay_patch_auto_obeys_the_variable() -> None:
    assert run(activation.status, "auto") == [False, False, None]


def test_explicit_activation_needs_no_variable() -> None:
    assert run(activation.status, "activate") == [True, True, "activate()"]


def test_deactivation_takes_everything_back() -> None:
    # wrapt's finder is wrapt's own, and may serve others.
    assert run(activation.deactivated) == [False, None, [], ["ImportHookFinder"]]


def test_a_value_that_is_not_understood_warns_at_load_and_refuses_at_use() -> None:
    heard, problems, at_activate, at_use = run(activation.refusals, REPLAY_PATCH="maybe")

    wanted = "REPLAY_PATCH='maybe' is not understood"
    assert wanted in heard
    assert wanted in problems[0]
    assert at_activate.startswith(f"SettingsError: {wanted}")
    assert at_use.startswith("PatchNotActive: replay is refused")
    assert wanted in at_use


def test_an_unknown_patch_in_skip_is_an_error() -> None:
    error = run(activation.settings_error, REPLAY_PATCH_SKIP="config_field")

    assert error.startswith("REPLAY_PATCH_SKIP names config_field; known: config_fields, ")


def test_a_failure_inside_the_entry_point_leaves_torch_importable(tmp_path: Path) -> None:
    (tmp_path / "wrapt.py").write_text("raise ImportError('a broken wrapt')")
    one, heard, problems = run(activation.torch_after_a_failure, path=tmp_path, REPLAY_PATCH="1")

    assert one == 1.0
    assert problems == ["activation failed: ImportError: a broken wrapt"]
    assert "replay-patch could not be activated by torch.backends" in heard
    assert "a broken wrapt" in heard


def test_the_log_goes_to_stderr_at_the_wanted_level() -> None:
    done = python("-c", "import torch", REPLAY_PATCH="1", REPLAY_PATCH_LOG="info")

    assert (
        "INFO replay_patch.patching.activation: replay-patch is active (torch.backends)"
        in done.stderr
    )


def test_entry_points() -> None:
    points = {
        group: [p.value for p in importlib.metadata.entry_points(group=group, name="replay_patch")]
        for group in ("torch.backends", "verl.plugins")
    }

    assert points == {
        "torch.backends": ["replay_patch.autoload:load"],
        "verl.plugins": ["replay_patch.auto"],
    }


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert run(activation.loaded_by_the_package) == []


def test_an_activation_that_fails_is_in_the_status_with_its_error(tmp_path: Path) -> None:
    """Case 95: the original error is kept."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Broken:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'replay_patch.patches.megatron.mtp_depth':\n"
        "            raise ImportError('a distinctive text')\n"
        "sys.meta_path.insert(0, Broken())\n"
    )
    enabled, active, problems = run(activation.problems, path=tmp_path, REPLAY_PATCH="1")

    assert (enabled, active) == (True, False)
    assert "activation failed: ImportError: a distinctive text" in problems
