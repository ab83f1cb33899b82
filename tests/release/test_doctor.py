"""`replay-patch doctor` on a real release, read by people and by machines."""

import json
import subprocess
from typing import Any

import megatron.core
import pytest
from helpers import fresh

# As a job on a GPU would find it: the doctor itself needs no CPU bed, but triton may be missing.
DOCTOR = """
import sys
from replay_patch.matrix import no_triton
no_triton.provide()
from replay_patch import cli
sys.exit(cli.main(["doctor", *sys.argv[1:]]))
"""


def doctor(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return fresh.python("-W", "ignore", "-c", DOCTOR, *args, **env)


def report(**env: str) -> tuple[int, dict[str, Any]]:
    done = doctor("--json", **env)
    return done.returncode, json.loads(done.stdout)


def test_all_is_well() -> None:
    code, found = report(REPLAY_PATCH="1")

    assert code == 0
    assert found["enabled"] is found["active"] is True
    assert found["trigger"] == "torch.backends"
    assert found["problems"] == []
    assert found["versions"]["megatron.core"]["version"] == megatron.core.__version__
    assert found["versions"]["megatron.core"]["path"].endswith("megatron/core")
    assert found["versions"]["torch"]["version"].startswith("2.")
    assert {p["state"] for p in found["patches"]} <= {"active", "not needed"}
    assert all(p.keys() == {"name", "state", "reason", "targets"} for p in found["patches"])


def test_the_text_says_the_same() -> None:
    done = doctor(REPLAY_PATCH="1")

    assert done.returncode == 0
    assert done.stdout.startswith("replay-patch is ACTIVE (activated by torch.backends).\n")
    assert megatron.core.__version__ in done.stdout
    assert "router_guard" in done.stdout
    assert "Problems" not in done.stdout


def test_off_is_no_error() -> None:
    done = doctor()
    code, found = report()

    assert done.returncode == code == 0
    assert done.stdout.startswith("replay-patch is OFF in this environment. Set REPLAY_PATCH=1")
    assert (found["enabled"], found["active"], found["problems"]) == (False, False, [])


@pytest.mark.parametrize(
    "env, problem",
    [
        ({"REPLAY_PATCH_SKIP": "config_fields"}, "patch config_fields is skipped"),
        ({"REPLAY_PATCH": "perhaps"}, "REPLAY_PATCH='perhaps' is not understood"),
        ({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, "switches off torch's loading of plugins"),
    ],
)
def test_what_is_wrong_is_said_and_is_exit_1(env: dict[str, str], problem: str) -> None:
    done = doctor(**{"REPLAY_PATCH": "1"} | env)
    code, found = report(**{"REPLAY_PATCH": "1"} | env)

    assert done.returncode == code == 1
    assert problem in done.stdout
    assert any(problem in p for p in found["problems"])
    assert found["active"] is False


def test_a_megatron_that_cannot_be_imported_is_named_with_its_error() -> None:
    """Case 95: the original error is kept."""
    broken = """
import sys
class Broken:
    def find_spec(self, name, path=None, target=None):
        if name == "megatron.core.transformer.moe.router":
            raise ImportError("a distinctive text")
sys.meta_path.insert(0, Broken())
"""
    done = fresh.python("-W", "ignore", "-c", broken + DOCTOR, REPLAY_PATCH="1")

    assert done.returncode == 1
    assert "Megatron cannot be imported: ImportError: a distinctive text" in done.stdout
