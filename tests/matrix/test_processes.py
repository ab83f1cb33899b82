"""Processes that misbehave or are stopped: what is reported, and that nothing is left behind."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
from helpers import interpreters, matrix_runs, misbehaving_checks

from replay_patch.matrix import runner
from replay_patch.matrix.checks import CHECKS
from replay_patch.matrix.environments import TESTED_RELEASES
from replay_patch.matrix.planning import Environment

pytestmark = pytest.mark.exhaustive

RELEASE = TESTED_RELEASES[0]
SLEEPS = """
def sleeps_here(*args, **kwargs):
    import time; time.sleep(600)

TopKRouter.forward = sleeps_here
"""


# --- checks -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Of `misbehaving_checks`, which leave nothing behind."""
    mark, temporary = str(uuid.uuid4()), tmp_path_factory.mktemp("tmp")

    done = interpreters.python(
        *("-m", misbehaving_checks.__name__), TMPDIR=str(temporary), **{matrix_runs.MARK: mark}
    )

    assert done.returncode == 0, done.stderr
    assert matrix_runs.processes(mark) == []
    assert list(temporary.iterdir()) == []
    return {cell["check"]: cell for cell in map(json.loads, done.stdout.splitlines())}


def test_each_check_has_one_cell_whatever_the_others_do(cells: dict[str, dict[str, Any]]) -> None:
    statuses = {name: cell["status"] for name, cell in cells.items()}

    assert statuses == {
        "works": "pass",
        "asserts": "fail",
        "does_not_apply": "skip",
        "leaves_by_exception": "fail",
        "hangs": "error",
        "ignores_signals": "error",
        "ranks_hang": "error",
        "leaves_a_child_behind": "pass",
        "dies_by_a_signal": "error",
        "exits_with_3": "error",
        "exits_with_0": "error",
        "prints_what_looks_like_a_cell": "pass",
        "prints_ten_megabytes": "fail",
        "says_what_is_no_text": "fail",
    }


@pytest.mark.parametrize(
    "check, first",
    [
        ("does_not_apply", "there is nothing to check"),
        ("asserts", "AssertionError: two and two are five"),
        ("leaves_by_exception", "SystemExit: enough"),
        ("dies_by_a_signal", "its process died (SIGSEGV):"),
        ("exits_with_3", "its process died (exit code 3):"),
        ("exits_with_0", "its process died (exit code 0):"),
        ("prints_ten_megabytes", "AssertionError: after ten megabytes"),
        ("says_what_is_no_text", "AssertionError: a file named ?"),
        ("hangs", f"still running after {misbehaving_checks.TIMEOUT:g} s, and killed. It was at:"),
    ],
)
def test_the_first_line_says_what_happened(
    check: str, first: str, cells: dict[str, dict[str, Any]]
) -> None:
    assert cells[check]["detail"].splitlines()[0] == first


def test_the_last_words_of_a_process_that_died_are_shown(cells: dict[str, dict[str, Any]]) -> None:
    assert cells["dies_by_a_signal"]["detail"].splitlines()[1:] == ["the last words"]


def test_a_long_message_does_not_hide_where_it_was_raised(
    cells: dict[str, dict[str, Any]],
) -> None:
    lines = cells["asserts"]["detail"].splitlines()

    assert len(lines) < 20
    assert lines[-1].startswith("at misbehaving_checks.py:")


@pytest.mark.parametrize(
    "check, processes",
    [
        ("hangs", ["check"]),
        ("ignores_signals", ["check"]),
        ("ranks_hang", ["rank0", "rank1"]),
    ],
)
def test_a_hang_shows_the_innermost_frames_of_its_processes(
    check: str, processes: list[str], cells: dict[str, dict[str, Any]]
) -> None:
    lines = cells[check]["detail"].splitlines()

    for process in processes:
        assert lines[lines.index(f"{process}:") + 1].endswith("in sleeps_here")


def test_a_timeout_shorter_than_the_start_of_a_process() -> None:
    command = ("-m", misbehaving_checks.__name__, "--timeout", "0.001", "hangs", "ignores_signals")

    done = interpreters.python(*command)

    statuses = [json.loads(line)["status"] for line in done.stdout.splitlines()]
    assert statuses == ["error", "error"]


# --- the run ----------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_reports_what_is_finished_and_leaves_nothing_behind(
    number: signal.Signals, tmp_path: Path
) -> None:
    """The first check is red, which is said at once; the second one hangs; the third one and the
    second environment never start."""
    hanging = {"transformer/moe/router.py": SLEEPS}
    forks = [matrix_runs.fork(RELEASE, tmp_path / name, hanging) for name in ("one", "two")]
    paths = [option for fork in forks for option in ("--megatron-path", str(fork))]
    checks = ("layer-map", "record", "replay")

    started = time.monotonic()
    done = matrix_runs.during(
        matrix_runs.interrupt_after("layer-map fail", number),
        *(*paths, "--only", ",".join(checks), "--jobs", "1"),
        REPLAY_PATCH_SKIP="layer_helpers",
    )

    assert time.monotonic() - started < 50  # the timeout of a check is 60 s
    assert done.code == 130
    unfinished = {(c["check"], c["status"], c["detail"]) for c in done.cells[1:]}
    assert [cell["check"] for cell in done.cells] == [*checks, *checks]
    assert done.cells[0]["status"] == "fail"
    assert unfinished == {(check, "error", "interrupted") for check in checks}
    assert "0 pass, 1 fail, 5 error" in done.out
    assert f"  record, replay on {RELEASE}: interrupted" in done.out


def test_a_killed_environment_is_an_error_and_the_run_goes_on(tmp_path: Path) -> None:
    """By the kernel, for want of memory. Its hanging cell must not keep the run waiting."""
    hanging = {"transformer/moe/router.py": SLEEPS}
    fork = matrix_runs.fork(RELEASE, tmp_path / "fork", hanging)

    def kill_once_red(process: "subprocess.Popen[str]") -> None:
        assert any("layer-map fail" in line for line in process.stderr or ())
        [cells] = children(process.pid)
        while not children(cells):  # until the next check has begun
            time.sleep(0.1)
        victims.extend(children(cells))
        os.kill(cells, signal.SIGKILL)
        for pid in victims:  # the kernel's next choice; nobody is left to do it
            os.kill(pid, signal.SIGKILL)

    victims: list[int] = []
    done = matrix_runs.during(
        kill_once_red,
        *("--megatron-path", str(fork), "--only", "layer-map,record", "--jobs", "1"),
        REPLAY_PATCH_SKIP="layer_helpers",
    )

    assert len(victims) == 1
    assert done.statuses(RELEASE) == {"layer-map": "fail", "record": "error"}
    assert "its process died (exit code -9)" in done.of(RELEASE)["record"]["detail"]


def children(pid: int) -> list[int]:
    shown = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True)
    pairs = [map(int, line.split()) for line in shown.stdout.splitlines()]
    return [child for child, parent in pairs if parent == pid]


def test_a_megatron_that_hangs_while_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    init = tmp_path / "megatron" / "core" / "__init__.py"
    init.write_text("import time; time.sleep(600)")
    monkeypatch.setattr(runner, "_IMPORT_SECONDS", 5.0)
    env = Environment("fork", tmp_path)

    started = time.monotonic()
    matrix = runner.run([env], [CHECKS["record"]], say=lambda line: print(line, file=sys.stderr))

    assert time.monotonic() - started < 30
    assert [(cell.status, cell.detail) for cell in matrix.cells] == [
        ("error", "no sign of life for 5 s, and killed")
    ]
