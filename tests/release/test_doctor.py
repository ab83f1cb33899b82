"""`replay-patch doctor` on a real release, read by people and by machines."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import megatron.core
import pytest
from helpers import interpreters

pytestmark = pytest.mark.mechanism


@dataclass(frozen=True)
class Report:
    code: int
    text: str
    data: dict[str, Any]


def doctor(tmp_path: Path, *args: str, **env: str) -> Report:
    out = tmp_path / "doctor.json"
    command = ("-W", "ignore", "-m", "programs.doctor", *args, "--json", str(out))
    done = interpreters.python(*command, **env)
    return Report(done.returncode, done.stdout, json.loads(out.read_text()))


def test_all_is_well(tmp_path: Path) -> None:
    report = doctor(tmp_path, REPLAY_PATCH="1")

    found = report.data
    assert report.code == 0
    assert found["enabled"] is found["active"] is True
    assert found["trigger"] == "torch.backends"
    assert found["problems"] == []
    assert found["versions"]["megatron.core"]["version"] == megatron.core.__version__
    assert found["versions"]["megatron.core"]["path"].endswith("megatron/core")
    assert found["versions"]["torch"]["version"].startswith("2.")
    assert {p["state"] for p in found["patches"]} <= {"active", "not needed"}
    assert all(p.keys() == {"name", "state", "reason", "targets"} for p in found["patches"])
    assert report.text.startswith("replay-patch is ACTIVE (activated by torch.backends).\n")
    assert megatron.core.__version__ in report.text
    assert "router_guard" in report.text
    assert "Problems" not in report.text


def test_off_is_no_error(tmp_path: Path) -> None:
    report = doctor(tmp_path)

    assert report.code == 0
    assert report.text.startswith("replay-patch is OFF in this environment. Set REPLAY_PATCH=1")
    assert [report.data[k] for k in ("enabled", "active", "problems")] == [False, False, []]


@pytest.mark.parametrize(
    "env, problem",
    [
        ({"REPLAY_PATCH_SKIP": "config_fields"}, "patch config_fields is skipped"),
        ({"REPLAY_PATCH": "perhaps"}, "REPLAY_PATCH='perhaps' is not understood"),
        ({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, "switches off torch's loading of plugins"),
    ],
)
def test_what_is_wrong_is_said_and_is_exit_1(
    env: dict[str, str], problem: str, tmp_path: Path
) -> None:
    report = doctor(tmp_path, **{"REPLAY_PATCH": "1"} | env)

    assert report.code == 1
    assert problem in report.text
    assert any(problem in p for p in report.data["problems"])
    assert report.data["active"] is False


def test_a_megatron_that_cannot_be_imported_is_named_with_its_error(tmp_path: Path) -> None:
    """Case 95: the original error is kept."""
    report = doctor(tmp_path, "--broken-router", REPLAY_PATCH="1")

    assert report.code == 1
    assert "Megatron cannot be imported: ImportError: a distinctive text" in report.text
