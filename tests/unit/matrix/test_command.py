"""The `replay-patch matrix` command: its list, its files and exit codes. Runs are played."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import interpreters
from programs.matrix import cpu_bed

from replay_patch import cli
from replay_patch.matrix import planning, runner
from replay_patch.matrix.checks import CHECKS
from replay_patch.matrix.runner import Cell, Matrix
from replay_patch.patching.registry import patches

Play = Callable[[Matrix], list[dict[str, Any]]]

GREEN = Matrix([Cell("0.12.1", None, "record", "pass", 1.0, "")])
RED = Matrix([Cell("0.12.1", None, "record", "fail", 1.0, "no")])


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    """Makes runs end with a matrix; returns what they were started with."""

    def play(matrix: Matrix) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []

        def run(environments: Any, checks: Any, **options: Any) -> Matrix:
            calls.append({"checks": [check.name for check in checks], **options})
            return matrix

        monkeypatch.setattr(planning, "plan", lambda *_, **__: [])
        monkeypatch.setattr(runner, "run", run)
        return calls

    return play


# --- the list ---------------------------------------------------------------------------------


def test_the_list_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["matrix", "--list", "--json"]) == 0

    rows = json.loads(capsys.readouterr().out)["checks"]
    assert [row["name"] for row in rows] == list(CHECKS)
    keys = {"name", "proves", "ranks", "mindspeed", "patches"}
    assert all(row.keys() == keys for row in rows)
    assert all(row["proves"].endswith(".") for row in rows)


def test_the_list_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["matrix", "--list"]) == 0

    out = capsys.readouterr().out
    assert [name for name in CHECKS if f"\n{name} " not in f"\n{out}"] == []
    assert max(map(len, out.splitlines())) <= 98


def test_the_list_of_some(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["matrix", "--list", "--only", "record,activation"]) == 0

    shown = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line[0] != " "]
    assert shown == ["activation", "record"]


def test_the_list_loads_no_torch() -> None:
    assert interpreters.run(cpu_bed.listed) == []


def test_checks_depend_on_patches_that_there_are() -> None:
    names = {patch.name for patch in patches()}

    assert {c.name: set(c.patches) - names for c in CHECKS.values() if set(c.patches) - names} == {}


# --- what is asked for ------------------------------------------------------------------------


def test_only_these_checks_in_the_order_of_the_list(play: Play) -> None:
    calls = play(GREEN)

    cli.main(["matrix", "--only", "replay,,activation", "--jobs", "3", "--timeout", "2.5"])

    assert calls[0]["checks"] == ["activation", "replay"]
    assert (calls[0]["jobs"], calls[0]["timeout"]) == (3, 2.5)


def test_all_checks_if_none_is_named(play: Play) -> None:
    calls = play(GREEN)

    cli.main(["matrix"])

    assert calls[0]["checks"] == list(CHECKS)


@pytest.mark.parametrize(
    "args, problem",
    [
        (["--only", "record,recrod"], "--only: unknown recrod; known: activation, off-is-off, "),
        (["--only", ","], "--only: unknown nothing; known: activation, "),
        (["--jobs", "0"], "--jobs 0; expected at least 1"),
        (["--timeout", "0"], "--timeout 0; expected seconds, more than 0"),
        (["--timeout", "-1"], "--timeout -1; expected"),
        (["--timeout", "nan"], "--timeout nan; expected"),
        (["--timeout", "inf"], "--timeout inf; expected"),
    ],
)
def test_what_makes_no_sense_is_refused(
    args: list[str],
    problem: str,
    play: Play,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls = play(GREEN)

    assert cli.main(["matrix", *args]) == 1
    assert capsys.readouterr().err.startswith(f"replay-patch: {problem}")
    assert calls == []


# --- what comes out ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "matrix, code",
    [
        (GREEN, 0),
        (RED, 1),
        (Matrix(), 1),
        (Matrix([Cell("0.12.1", None, "record", "skip", 1.0, "why")]), 1),
        (Matrix([Cell("0.12.1", None, "record", "error", 1.0, "why")]), 1),
        (Matrix(GREEN.cells, interrupted=True), 130),
    ],
)
def test_the_exit_code(matrix: Matrix, code: int, play: Play) -> None:
    play(matrix)

    assert cli.main(["matrix"]) == code


def test_all_outputs_at_once(
    tmp_path: Path,
    play: Play,
    capsys: pytest.CaptureFixture[str],
) -> None:
    play(RED)
    paths = [str(tmp_path / name) for name in ("m.json", "m.xml", "m.md")]

    cli.main(["matrix", "--json", paths[0], "--junit", paths[1], "--markdown", paths[2]])

    assert "record      FAIL" in capsys.readouterr().out
    texts = [Path(path).read_text(encoding="utf-8") for path in paths]
    assert json.loads(texts[0]) == RED.to_dict()
    assert 'failures="1"' in texts[1]
    assert "| record | **FAIL** |" in texts[2]


def test_json_to_stdout_replaces_the_table(play: Play, capsys: pytest.CaptureFixture[str]) -> None:
    play(GREEN)

    assert cli.main(["matrix", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == GREEN.to_dict()


@pytest.mark.parametrize(
    "option, what", [("--junit", "JUnit XML"), ("--markdown", "Markdown"), ("--json", "JSON")]
)
@pytest.mark.parametrize("place", ["missing/file", "."])
def test_a_file_that_cannot_be_written_is_refused_before_the_run(
    option: str,
    what: str,
    place: str,
    tmp_path: Path,
    play: Play,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls = play(GREEN)
    path = tmp_path / place

    assert cli.main(["matrix", option, str(path)]) == 1
    problem = f"replay-patch: the {what} cannot be written to {path}: "
    assert capsys.readouterr().err.startswith(problem)
    assert calls == []


def test_a_file_that_cannot_be_written_in_the_end_keeps_nothing_else_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [str(tmp_path / name) for name in ("m.json", "m.xml", "m.md")]

    def run(*_: Any, **__: Any) -> Matrix:
        (tmp_path / "m.xml").unlink()
        (tmp_path / "m.xml").mkdir()
        return GREEN

    monkeypatch.setattr(planning, "plan", lambda *_, **__: [])
    monkeypatch.setattr(runner, "run", run)

    code = cli.main(["matrix", "--json", paths[0], "--junit", paths[1], "--markdown", paths[2]])

    shown = capsys.readouterr()
    assert code == 1
    assert "the JUnit XML cannot be written to" in shown.err
    assert "1 pass" in shown.out
    assert json.loads(Path(paths[0]).read_text()) == GREEN.to_dict()
    assert "1 pass" in Path(paths[2]).read_text()


def test_a_file_is_kept_until_there_is_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.xml"
    path.write_text("the last run")
    seen = []

    def run(*_: Any, **__: Any) -> Matrix:
        seen.append(path.read_text())
        return GREEN

    monkeypatch.setattr(planning, "plan", lambda *_, **__: [])
    monkeypatch.setattr(runner, "run", run)

    cli.main(["matrix", "--junit", str(path)])

    assert seen == ["the last run"]
    assert path.read_text().startswith("<?xml")


def test_environments_that_cannot_be_had_cost_no_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [option for name in "ab" for option in ("--megatron-path", str(tmp_path / name))]

    assert cli.main(["matrix", *paths, "--json", "--only", "record,replay"]) == 1

    found = json.loads(capsys.readouterr().out)
    assert [(c["megatron"], c["check"], c["status"]) for c in found["cells"]] == [
        (str(tmp_path / name), check, "error") for name in "ab" for check in ("record", "replay")
    ]
    assert all("holds no megatron/core" in cell["detail"] for cell in found["cells"])
    assert found["drift"] == []
