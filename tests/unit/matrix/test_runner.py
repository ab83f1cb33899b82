"""Environments that cannot be had, which cost no process: what is said of them."""

from pathlib import Path
from typing import Any

import pytest

from replay_patch.matrix import runner
from replay_patch.matrix.checks import CHECKS
from replay_patch.matrix.environments import TESTED_RELEASES
from replay_patch.matrix.planning import Environment

TWO = [CHECKS["replay"], CHECKS["record"]]


def test_a_cell_for_every_check_in_the_order_asked_for() -> None:
    said: list[str] = []

    matrix = runner.run([Environment("9.9.9", problem="not there")], TWO, say=said.append)

    cells = [(c.megatron, c.check, c.status, c.detail) for c in matrix.cells]
    assert cells == [("9.9.9", check.name, "error", "not there") for check in TWO]
    assert said == ["9.9.9: 2 error (0 s of checks)"]
    assert (matrix.green, matrix.interrupted, matrix.drift) == (False, False, [])


def test_nothing_to_run_is_not_green() -> None:
    matrix = runner.run([], TWO)

    assert matrix.cells == []
    assert not matrix.green


def names(*environments: Environment) -> list[tuple[str, str | None]]:
    matrix = runner.run(environments, TWO[:1], say=lambda line: None)
    return [(cell.megatron, cell.mindspeed) for cell in matrix.cells]


def test_names_stay_short_where_they_can() -> None:
    environments = [Environment("1", problem="x"), Environment("1", None, "MS", problem="x")]

    assert names(*environments) == [("1", None), ("1", "MS")]


def test_mindspeeds_of_one_name_are_told_apart() -> None:
    paths = (Path("/a/MindSpeed"), Path("/b/MindSpeed"))
    environments = [Environment("1", None, "MindSpeed", path, "x") for path in paths]

    assert names(*environments) == [("1 (1)", f"MindSpeed ({path})") for path in paths]


def test_a_folder_that_is_named_as_a_release_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Any] = []

    def examine(path: Any, **_: Any) -> dict[str, Any]:
        looked.append(path)
        raise OSError("enough")

    monkeypatch.setattr(runner.fingerprints_on_bed, "examine", examine)
    folder, release = Path("/nowhere"), TESTED_RELEASES[0]

    runner._EnvironmentRun(Environment(release, folder), TWO, 1, 1.0, lambda _: None).run()

    assert looked == [[folder]]
