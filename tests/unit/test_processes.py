"""The environment of the processes that run on a Megatron of the user's choice."""

import os
from pathlib import Path

import pytest

import replay_patch
from replay_patch import processes


def test_the_folders_come_first_then_the_callers_path_then_this_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Last, so that a stale dist-info of ours that hides the plugin from a job (case D4) hides it
    here, too."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["/theirs", ""]))

    path = processes.environ(["/megatron"])["PYTHONPATH"].split(os.pathsep)

    parent = Path(replay_patch.__file__).absolute().parents[1]
    installed = parent.name in ("site-packages", "dist-packages")
    assert path == ["/megatron", "/theirs", *([] if installed else [str(parent)])]


def test_the_plugin_is_on_whatever_the_caller_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 94, and the settings of the caller that are not about that."""
    monkeypatch.setenv("REPLAY_PATCH", "0")
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    monkeypatch.setenv("REPLAY_PATCH_SKIP", "mtp_depth")

    environ = processes.environ()

    assert environ["REPLAY_PATCH"] == environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "1"
    assert environ["REPLAY_PATCH_SKIP"] == "mtp_depth"
