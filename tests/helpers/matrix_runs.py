"""Runs of `replay-patch matrix` as a user starts them, and Megatrons that are not as they were.

Every process of a run carries a mark in its environment, by which those left behind are found.
"""

import fnmatch
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from helpers import interpreters

from replay_patch.matrix.checks import CHECKS
from replay_patch.matrix.environments import NEWEST, TESTED_RELEASES, cache_dir, environment

RELEASES = (TESTED_RELEASES[0], "0.16.1", "0.18.2", NEWEST)
"""The oldest and the newest, and between them: every patch is needed on one of these."""

OF_MEGATRON = [name for name, check in CHECKS.items() if not check.mindspeed]
"""The checks that are run on a Megatron without MindSpeed."""

MARK = "MARK_OF_A_MATRIX_TEST"
JOBS = 2
OFFLINE = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_NO_INDEX": "0"}


@dataclass(frozen=True)
class Done:
    """A run that has ended."""

    code: int
    out: str
    err: str
    cells: list[dict[str, Any]] = field(default_factory=list)
    drift: list[dict[str, str]] = field(default_factory=list)

    def of(self, megatron: str) -> dict[str, dict[str, Any]]:
        """The cells of one environment, by check."""
        return {cell["check"]: cell for cell in self.cells if cell["megatron"] == megatron}

    def statuses(self, megatron: str) -> dict[str, str]:
        return {check: cell["status"] for check, cell in self.of(megatron).items()}


def run(*args: str, cache: Path | None = None, **env: str) -> Done:
    """`replay-patch matrix ARGS`. It must leave neither processes nor temporary files behind.

    Args:
        cache: of releases; the user's by default.
        env: variables to set.
    """
    return during(lambda process: None, *args, cache=cache, **env)


def during(
    act: Callable[["subprocess.Popen[str]"], None],
    *args: str,
    cache: Path | None = None,
    leaves: str = "",
    **env: str,
) -> Done:
    """`run`, and call `act` with the process while it runs; its stderr is a pipe that may be read.

    Args:
        leaves: names, as of glob, of temporary files that are not ours.
    """
    mark = str(uuid.uuid4())
    with tempfile.TemporaryDirectory() as folder:
        out, temporary = Path(folder, "out.json"), Path(folder, "tmp")
        temporary.mkdir()
        options = ["--json", str(out), "--cache", str(cache or cache_dir())]
        options += [] if "--jobs" in args else ["--jobs", str(JOBS)]
        process = subprocess.Popen(
            [sys.executable, "-m", "replay_patch.cli", "matrix", *args, *options],
            env=interpreters.clean_environ() | {MARK: mark, "TMPDIR": str(temporary)} | env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A job in the background ignores Ctrl-C, and what it starts inherits that.
            preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )
        try:
            assert processes(mark) != []  # or it could not be seen, either, if it stayed
            act(process)
            shown = process.communicate(timeout=300)
        finally:
            process.kill()
        assert processes(mark) == [], "left behind"
        left = [path.name for path in temporary.iterdir()]
        assert [name for name in left if not fnmatch.fnmatch(name, leaves)] == [], "left behind"
        data = json.loads(out.read_text()) if out.exists() and out.stat().st_size else {}
    assert data.keys() in (set(), {"schema", "cells", "drift"})
    assert data.get("schema", 1) == 1
    return Done(process.returncode, *shown, data.get("cells", []), data.get("drift", []))


def interrupt_after(
    text: str, number: signal.Signals = signal.SIGINT
) -> Callable[["subprocess.Popen[str]"], None]:
    """For `during`: wait for a line that holds `text` on stderr, then send a signal."""

    def act(process: "subprocess.Popen[str]") -> None:
        assert process.stderr is not None
        assert any(text in line for line in process.stderr), "it has ended"
        process.send_signal(number)

    return act


def processes(mark: str) -> list[str]:
    """The processes that have `mark` in their environment; zombies have none."""
    shown = subprocess.run(
        ["ps", "axeww", "-o", "pid=,command="], capture_output=True, text=True, check=True
    ).stdout
    return [line.partition("PATH=")[0] for line in shown.splitlines() if mark in line]


@functools.cache
def release(version: str) -> Path:
    return environment(version)


def fork(version: str, folder: Path, more: Mapping[str, str] | None = None) -> Path:
    """A copy of a release (links, where nothing changes).

    Args:
        version: of the release.
        folder: to make.
        more: file in `megatron/core` -> code to add at its end.
    """
    source = release(version) / "megatron"
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(source, folder / "megatron", copy_function=os.symlink, ignore=ignore)
    for name, code in (more or {}).items():
        path = folder / "megatron" / "core" / name
        text = path.read_text()
        path.unlink()
        path.write_text(f"{text}\n{code}\n")
    return folder
