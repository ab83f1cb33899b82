"""For all tests: they must run on the installation that `tests/run.py` means."""

import os
from pathlib import Path

import replay_patch


def pytest_report_header() -> str:
    return f"replay-patch {replay_patch.__version__} from {Path(replay_patch.__file__).parent}"


def pytest_sessionstart() -> None:
    expected = os.environ.get("TESTED_INSTALLATION")
    found = Path(replay_patch.__file__).parent.parent
    if expected and found != Path(expected) and Path(expected) not in found.parents:
        raise RuntimeError(f"replay_patch was imported from {found}; expected {expected}")
