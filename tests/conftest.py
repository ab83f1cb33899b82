"""For all tests: the installation that `tests/run.py` means, its progress, and `--few`."""

import os
from collections import defaultdict
from pathlib import Path

import pytest

import replay_patch

CASES = 2  # of a parametrized test, with --few
UNCUT = "unit"  # this folder is quick as a whole


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--few",
        action="store_true",
        help="as `make test`: no tests marked `exhaustive`, and of each other test the first and "
        "the last case only (all cases in tests/unit)",
    )


def pytest_report_header() -> str:
    return f"replay-patch {replay_patch.__version__} from {Path(replay_patch.__file__).parent}"


def pytest_sessionstart() -> None:
    expected = os.environ.get("TESTED_INSTALLATION")
    found = Path(replay_patch.__file__).parent.parent
    if expected and found != Path(expected) and Path(expected) not in found.parents:
        raise RuntimeError(f"replay_patch was imported from {found}; expected {expected}")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("few"):
        return
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("exhaustive") is None:
            cases[item.nodeid.partition("[")[0]].append(item)
    kept = {id(item) for function in cases.values() for item in _few(function)}
    dropped = [item for item in items if id(item) not in kept]
    items[:] = [item for item in items if id(item) in kept]
    config.hook.pytest_deselected(items=dropped)


def _few(cases: list[pytest.Item]) -> list[pytest.Item]:
    """The first and the last case: those between are mostly products of their parameters."""
    folder = cases[0].path.relative_to(Path(__file__).parent).parts[0]
    if folder == UNCUT or len(cases) <= CASES:
        return cases
    return [cases[0], cases[-1]]


# --- progress -----------------------------------------------------------------------------------

_count = 0
_finished = 0


def pytest_collection_finish(session: pytest.Session) -> None:
    global _count
    _count = len(session.items)


def pytest_runtest_logfinish() -> None:
    """Write "finished/all" where `tests/run.py` reads it."""
    global _finished
    _finished += 1
    if path := os.environ.get("TEST_PROGRESS"):
        Path(path).write_text(f"{_finished}/{_count}")
