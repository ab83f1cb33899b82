"""Forks, halves and wrecks of Megatron, next to a good one: nearly all of them in two runs."""

from pathlib import Path

import pytest
from helpers import matrix_runs

from replay_patch.matrix.environments import TESTED_RELEASES

GOOD = TESTED_RELEASES[0]
pytestmark = pytest.mark.exhaustive

CHECKS = ("layer-map", "topk-seam", "record", "pp")
OF_THE_PLUGIN = ("activation", *CHECKS)
"""The first starts interpreters of its own, seconds long: only where it can say something."""
CLAIMING = ("claims", "stale")
BAD_ROUTER = """
def {name}(self, *args, **kwargs):
    {does}

TopKRouter.forward = {name}
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("megatrons")

    def fork(name: str, **more: str) -> None:
        """With code at the end of some files of `megatron/core`."""
        files = {file.replace("__", "/") + ".py": code for file, code in more.items()}
        matrix_runs.fork(GOOD, root / name, files)

    dies = BAD_ROUTER.format(name="dies_here", does="import os; os.kill(os.getpid(), 11)")
    fork("same")
    fork("dies", transformer__moe__router=dies)
    fork("claims", package_info='__version__ = "0.19.0"')
    fork("prints", package_info='print("{}" + chr(10) * 3 + "[1")')
    fork("exits", package_info="import os; os._exit(7)")
    fork("refuses", package_info="raise ImportError('libcuda.so.1: cannot open shared object')")
    (root / "half" / "megatron" / "core").mkdir(parents=True)
    (root / "half" / "megatron" / "core" / "__init__.py").write_text("")
    matrix_runs.fork(GOOD, root / "stale")
    (root / "stale" / "replay_patch-0.0.1.dist-info").mkdir()
    (root / "stale" / "replay_patch-0.0.1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: replay-patch\nVersion: 0.0.1\n"
    )
    (root / "empty").mkdir()
    return {folder.name: folder for folder in sorted(root.iterdir())}


@pytest.fixture(scope="module")
def done(folders: dict[str, Path]) -> matrix_runs.Done:
    asked = [path for name, path in folders.items() if name not in CLAIMING]
    paths = [option for path in asked for option in ("--megatron-path", str(path))]
    return matrix_runs.run("--megatron", f"{GOOD},0.10.0", *paths, "--only", ",".join(CHECKS))


@pytest.fixture(scope="module")
def claiming(folders: dict[str, Path]) -> matrix_runs.Done:
    """Of those whose metadata, or that beside them, says what is not so."""
    asked = [folders[name] for name in CLAIMING]
    paths = [option for path in asked for option in ("--megatron-path", str(path))]
    return matrix_runs.run(*paths, "--only", ",".join(OF_THE_PLUGIN))


def name(folder: Path) -> str:
    """Of an environment: the version is not enough here."""
    return f"{GOOD} ({folder})"


def test_the_good_ones_are_reported_next_to_the_bad(
    done: matrix_runs.Done, folders: dict[str, Path]
) -> None:
    assert done.code == 1
    assert len(done.cells) == len(CHECKS) * (2 + len(folders) - len(CLAIMING))
    assert done.statuses(f"{GOOD} ({GOOD})") == dict.fromkeys(CHECKS, "pass")


def test_a_fork_of_the_same_version_is_told_apart(
    done: matrix_runs.Done, folders: dict[str, Path]
) -> None:
    assert done.statuses(name(folders["same"])) == dict.fromkeys(CHECKS, "pass")


def test_an_unknown_release_is_an_error(done: matrix_runs.Done) -> None:
    assert done.statuses("0.10.0") == dict.fromkeys(CHECKS, "error")
    assert "replay-patch supports 0.12.0 and later" in done.of("0.10.0")["record"]["detail"]


def test_a_check_that_kills_its_process_is_an_error(
    done: matrix_runs.Done, folders: dict[str, Path]
) -> None:
    cells = done.of(name(folders["dies"]))

    assert cells["record"]["status"] == "error"
    assert cells["record"]["detail"].startswith("its process died (SIGSEGV)")
    assert cells["pp"]["status"] == "fail"
    assert cells["layer-map"]["status"] == "pass"


def test_what_there_is_decides_and_not_the_version(claiming: matrix_runs.Done) -> None:
    """Case 11: the oldest release, which says it is 0.19.0 and has none of what that has."""
    assert claiming.statuses("0.19.0") == dict.fromkeys(OF_THE_PLUGIN, "pass")


def test_megatron_may_print_what_it_likes(done: matrix_runs.Done, folders: dict[str, Path]) -> None:
    assert done.statuses(name(folders["prints"])) == dict.fromkeys(CHECKS, "pass")


def test_a_stale_dist_info_that_hides_ours_is_red(claiming: matrix_runs.Done) -> None:
    """Case D4."""
    cells = claiming.of(GOOD)

    assert cells["activation"]["status"] == "fail"
    assert "does no stale dist-info hide it?" in cells["activation"]["detail"]


@pytest.mark.parametrize(
    "folder, problem",
    [
        ("empty", "holds no megatron/core; expected the folder of a Megatron-LM checkout"),
        ("half", "No module named 'megatron.core.package_info'"),
        ("refuses", "ImportError: libcuda.so.1: cannot open shared object"),
        ("exits", "its process died (exit code 7)"),
    ],
)
def test_a_megatron_that_cannot_be_imported_is_an_error(
    folder: str, problem: str, done: matrix_runs.Done, folders: dict[str, Path]
) -> None:
    asked = str(folders[folder])

    assert done.statuses(asked) == dict.fromkeys(CHECKS, "error")
    assert problem in done.of(asked)["record"]["detail"]
    assert f"  every check on {asked}: " in done.out


def test_a_check_that_hangs_is_killed_and_says_where_it_was(tmp_path: Path) -> None:
    sleeps = BAD_ROUTER.format(name="sleeps_here", does="import time; time.sleep(600)")
    fork = matrix_runs.fork(GOOD, tmp_path / "fork", {"transformer/moe/router.py": sleeps})
    options = ("--only", "layer-map,record,pp", "--timeout", "8", "--jobs", "4")

    cells = matrix_runs.run("--megatron-path", str(fork), *options).of(GOOD)

    assert cells["layer-map"]["status"] == "pass"
    for check, process in (("record", "check"), ("pp", "rank0")):
        assert cells[check]["status"] == "error"
        assert 8 <= cells[check]["seconds"] < 16
        said = cells[check]["detail"].splitlines()
        assert said[0] == "still running after 8 s, and killed. It was at:"
        assert "in sleeps_here" in said[said.index(f"{process}:") + 1]
