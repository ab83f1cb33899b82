"""What `replay-patch matrix` is asked for, as environments; downloads are played."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from replay_patch import cli
from replay_patch.errors import ReplayPatchError
from replay_patch.matrix import planning, runner
from replay_patch.matrix.environments import NEWEST, TESTED_RELEASES
from replay_patch.matrix.planning import Environment, plan
from replay_patch.matrix.runner import Matrix

CACHE = Path("/cache")


@pytest.fixture(autouse=True)
def downloads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The releases that were asked of the cache; it has all but 9.9.9."""
    asked = []

    def environment(release: str, cache: str | None) -> Path:
        asked.append(release)
        if release == "9.9.9":
            raise ReplayPatchError("no such release")
        return CACHE / release

    monkeypatch.setattr(planning, "environment", environment)
    monkeypatch.setattr(planning, "is_installed", lambda name: name != "mindspeed")
    return asked


def quietly(*args: object, **kwargs: object) -> list[Environment]:
    return plan(*args, **kwargs, say=lambda line: None)


def release(version: str) -> Environment:
    return Environment(version, CACHE / version, is_tested=True)


def megatron(folder: Path) -> Path:
    (folder / "megatron" / "core").mkdir(parents=True)
    return folder


def mindspeed(folder: Path, branch: str = "") -> Path:
    (folder / "mindspeed").mkdir(parents=True)
    if branch:
        git = ["git", "-C", str(folder)]
        subprocess.run([*git, "init", "-q", "-b", branch], check=True)
        name = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
        subprocess.run(
            [*git, *name, "commit", "-q", "--allow-empty", "--no-verify", "-m", "x"], check=True
        )
    return folder


# --- Megatron ---------------------------------------------------------------------------------


def test_all_are_the_tested_releases() -> None:
    assert quietly(["all"]) == [release(version) for version in TESTED_RELEASES]


def test_latest_is_the_newest_and_named_so() -> None:
    assert quietly(["latest"]) == [release(NEWEST)]


def test_a_release_named_twice_is_run_once(downloads: list[str]) -> None:
    assert quietly(["0.12.1", "0.13.0", "0.12.1"]) == [release("0.12.1"), release("0.13.0")]
    assert len(quietly(["all", "latest", "0.14.0"])) == len(TESTED_RELEASES)
    assert downloads[:2] == ["0.12.1", "0.13.0"]


def test_an_unknown_release_is_a_problem_of_its_own() -> None:
    assert quietly(["0.12.1", "9.9.9", "0.13.0"]) == [
        release("0.12.1"),
        Environment("9.9.9", problem="no such release"),
        release("0.13.0"),
    ]


def test_a_folder_with_megatron(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    megatron(tmp_path / "fork")
    monkeypatch.chdir(tmp_path)

    assert quietly((), ["fork", "fork"]) == [Environment("fork", tmp_path / "fork")]


@pytest.mark.parametrize("name", ["empty", "missing"])
def test_a_folder_without_megatron_is_a_problem(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()

    [found] = quietly((), [str(tmp_path / name)])

    assert f"{tmp_path / name} holds no megatron/core; expected the folder of" in found.problem


def test_without_a_wish_the_installed_one_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert quietly() == [Environment("installed")]

    monkeypatch.setattr(planning, "is_installed", lambda name: True)

    assert quietly() == [Environment("installed"), Environment("installed", mindspeed="installed")]


# --- MindSpeed --------------------------------------------------------------------------------


def test_mindspeed_by_its_branch(tmp_path: Path) -> None:
    path = mindspeed(tmp_path / "core_r0.14.0", branch="2.3.0_core_r0.12.1")

    [found] = quietly(mindspeed_paths=[str(path)])

    assert found == replace(release("0.12.1"), mindspeed="core_r0.14.0", mindspeed_path=path)


def test_mindspeed_by_the_name_of_its_folder(tmp_path: Path) -> None:
    path = mindspeed(tmp_path / "MindSpeed-core_r0.14.0")

    [found] = quietly(mindspeed_paths=[str(path)])

    assert found.megatron == "0.14.0"


def test_mindspeed_by_its_folder_where_there_is_no_git(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = mindspeed(tmp_path / "core_r0.14.0")
    monkeypatch.setenv("PATH", "")

    [found] = quietly(mindspeed_paths=[str(path)])

    assert found.megatron == "0.14.0"


def test_mindspeed_for_a_release_that_is_not_tested_takes_one_that_is(tmp_path: Path) -> None:
    path = mindspeed(tmp_path / "core_r0.15.1")

    [found] = quietly(mindspeed_paths=[str(path)])

    assert found.megatron == "0.15.3"


def test_mindspeed_for_a_release_said(tmp_path: Path) -> None:
    path = mindspeed(tmp_path / "core_r0.14.0")

    [found] = quietly(mindspeed_paths=[f"{path}=0.12.3"])

    assert found == replace(release("0.12.3"), mindspeed="core_r0.14.0", mindspeed_path=path)


def test_mindspeed_for_a_folder_said(tmp_path: Path) -> None:
    path, fork = mindspeed(tmp_path / "MindSpeed"), megatron(tmp_path / "fork")

    [found] = quietly(mindspeed_paths=[f"{path}={fork}"])

    assert found == Environment(str(fork), fork, "MindSpeed", path)


def test_mindspeed_of_no_known_release_goes_with_the_only_one_asked_for(tmp_path: Path) -> None:
    path = mindspeed(tmp_path / "MindSpeed")

    found = quietly(["0.14.0"], mindspeed_paths=[str(path)])

    assert found == [
        release("0.14.0"),
        replace(release("0.14.0"), mindspeed="MindSpeed", mindspeed_path=path),
    ]


@pytest.mark.parametrize("releases", [[], ["0.13.0", "0.14.0"]])
def test_mindspeed_of_no_known_release_is_a_problem(tmp_path: Path, releases: list[str]) -> None:
    path = mindspeed(tmp_path / "MindSpeed")

    found = quietly(releases, mindspeed_paths=[str(path)])[-1]

    assert found.megatron == "?"
    assert f"which Megatron {path} is for can be told neither from its branch" in found.problem
    assert "--mindspeed-path DIR=RELEASE" in found.problem


def test_a_folder_without_mindspeed_is_a_problem(tmp_path: Path) -> None:
    [found] = quietly(mindspeed_paths=[str(tmp_path)])

    assert found.problem.startswith(f"{tmp_path} holds no mindspeed; expected")


def test_mindspeed_for_an_unknown_release_is_a_problem(tmp_path: Path) -> None:
    path = mindspeed(tmp_path / "MindSpeed")

    [found] = quietly(mindspeed_paths=[f"{path}=9.9.9"])

    assert (found.megatron, found.problem) == ("9.9.9", "no such release")


# --- the command line -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args",
    [
        ["--megatron", "0.12.1,0.13.0"],
        ["--megatron", " 0.12.1 , 0.13.0,"],
        ["--megatron", "0.12.1", "--megatron", "0.13.0,0.12.1"],
    ],
)
def test_the_command_takes_lists(args: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(runner, "run", lambda wanted, *_, **__: seen.extend(wanted) or Matrix())

    cli.main(["matrix", *args])

    assert seen == [release("0.12.1"), release("0.13.0")]
