import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.interpreters import python

from replay_patch import cli
from replay_patch.patching.registry import patches

STATUS = (
    "import torch, replay_patch as r; s = r.status(); "
    "print(s.enabled, s.active, s.trigger, end=' ')"
)


def replay_patch(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "replay_patch.cli", *args, **env)


def test_patches_as_json() -> None:
    out = json.loads(replay_patch("patches", "--json").stdout)

    assert [p["name"] for p in out["patches"]] == [p.name for p in patches()]
    assert all(p.keys() == {"name", "targets", "why", "state"} for p in out["patches"])


def test_patches_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["patches"]) == 0
    out = capsys.readouterr().out
    assert [p.name for p in patches() if p.name not in out] == []


def test_json_to_a_file_leaves_the_text_on_stdout(tmp_path: Path) -> None:
    done = replay_patch("patches", "--json", str(tmp_path / "out.json"))

    assert json.loads((tmp_path / "out.json").read_text())["patches"]
    assert "config_fields" in done.stdout


def test_json_to_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    done = replay_patch("patches", "--json", str(tmp_path / "missing" / "out.json"))

    assert done.returncode == 1
    assert "replay-patch: the JSON cannot be written to " in done.stderr


def test_run_reaches_the_command_and_its_children_without_torchs_autoload() -> None:
    code = f"{STATUS}; import subprocess as s, sys; s.run([sys.executable, '-c', {STATUS!r}])"

    done = replay_patch("run", "--", sys.executable, "-c", code, TORCH_DEVICE_BACKEND_AUTOLOAD="0")

    assert done.stderr == ""
    assert done.stdout == "True True replay-patch run " * 2


def test_run_keeps_the_users_own_sitecustomize(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.mine = 'kept'")

    done = replay_patch("run", "--", sys.executable, "-c", "print(mine)", PYTHONPATH=str(tmp_path))

    assert done.stdout == "kept\n"


def test_run_activates_although_the_users_sitecustomize_fails(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("raise RuntimeError('mine')")
    env = {"PYTHONPATH": str(tmp_path), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}

    done = replay_patch("run", "--", sys.executable, "-c", STATUS, **env)

    assert done.stdout == "True True replay-patch run "
    assert "mine" in done.stderr


def test_run_passes_on_the_exit_code() -> None:
    assert replay_patch("run", "--", sys.executable, "-c", "raise SystemExit(3)").returncode == 3


def test_run_of_a_command_that_is_not_there() -> None:
    done = replay_patch("run", "--", "no-such-command")

    assert done.returncode == 127
    assert done.stderr.startswith("replay-patch: cannot run no-such-command: No such file")


def test_run_of_nothing() -> None:
    done = replay_patch("run")

    assert done.returncode == 1
    assert done.stderr == "replay-patch: nothing to run: replay-patch run -- COMMAND ...\n"
