"""Run checks on one Megatron after the other, or on several at once, and collect the cells.

Each environment (a Megatron, with or without MindSpeed) is a process that imports it once
(`replay_patch.matrix.cells`); each of its cells is a process of its own.
"""

import collections
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from replay_patch.drift import comparison
from replay_patch.matrix.planning import Environment, Say, is_installed
from replay_patch.matrix.registry import Check
from replay_patch.processes import environ

__all__ = ["Cell", "Matrix", "run"]

_IMPORT_SECONDS = 300.0  # Megatron with all its optional packages, on a slow file system
_STOP_SECONDS = 5.0
_POLL_SECONDS = 0.2
_LINES_KEPT = 12
_STANDINS = Path(__file__).with_name("standins")


@dataclass(frozen=True)
class Cell:
    """What one check said of one environment."""

    megatron: str
    mindspeed: str | None
    check: str
    status: str
    """ "pass", "fail", "skip" (it says nothing about this one), "error" (it could not be run)."""
    seconds: float
    detail: str
    """Of anything but "pass": why, in a few lines."""


@dataclass
class Matrix:
    """All cells, by environment and in the order of the checks, and what differs from the tested
    releases: items as `drift.compare` gives them, with the key `megatron`."""

    cells: list[Cell] = field(default_factory=list)
    drift: list[dict[str, str]] = field(default_factory=list)
    interrupted: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The JSON of `replay-patch matrix --json`."""
        return {"schema": 1, "cells": [asdict(c) for c in self.cells], "drift": self.drift}

    @property
    def green(self) -> bool:
        """Whether some cell passed, and none is a fail or an error."""
        found = {cell.status for cell in self.cells}
        return "pass" in found and not found & {"fail", "error"}


# --- running ----------------------------------------------------------------------------------


def run(
    environments: Sequence[Environment],
    checks: Sequence[Check],
    *,
    jobs: int | None = None,
    timeout: float = 60.0,
    say: Say = print,
) -> Matrix:
    """Run every check in every environment. Ctrl-C ends it with the cells that are finished.

    Args:
        environments: as `plan` makes them.
        checks: what to run.
        jobs: processes at once; None: as many as there are processors.
        timeout: of one cell, in seconds.
        say: called with a line for each environment that is done, and for each red cell.
    """
    jobs = jobs or os.cpu_count() or 1
    at_once = max(1, min(jobs, len(environments)))
    share = max(1, jobs // at_once)
    runs = [_Run(env, checks, share, timeout, say) for env in environments]
    interrupted = False
    with ThreadPoolExecutor(at_once) as pool:
        futures = [pool.submit(one.run) for one in runs]
        try:
            while wait(futures, _POLL_SECONDS).not_done:
                pass  # another thread may get the signal, and would not wake a waiting one
        except KeyboardInterrupt:
            interrupted = True
            say("interrupted: stopping")
            for one in runs:
                one.stop()
        for future in futures:
            future.result()
    cells = [cell for one in runs for cell in one.in_order()]
    return Matrix(_told_apart(cells, runs), [i for one in runs for i in one.drift], interrupted)


def _told_apart(cells: list[Cell], runs: Sequence["_Run"]) -> list[Cell]:
    """Two of one version (a release and a fork) also get the name they were asked by."""
    asked = collections.Counter((one.env.megatron, one.env.mindspeed) for one in runs)
    if max(asked.values(), default=0) < 2:
        return cells
    out = []
    for one in runs:
        megatron, mindspeed = one.env.megatron, one.env.mindspeed
        if asked[megatron, mindspeed] > 1:
            megatron = f"{megatron} ({one.asked})"
            mindspeed = mindspeed and f"{mindspeed} ({one.env.mindspeed_path or 'installed'})"
        out += [replace(c, megatron=megatron, mindspeed=mindspeed) for c in one.in_order()]
    return out


class _Run:
    """One environment: its process, and what it has said."""

    def __init__(
        self, env: Environment, checks: Sequence[Check], jobs: int, timeout: float, say: Say
    ) -> None:
        self.env, self.asked = env, env.megatron
        self.drift: list[dict[str, str]] = []
        self._checks = [check for check in checks if env.mindspeed or not check.mindspeed]
        self._jobs, self._timeout, self._say = jobs, timeout, say
        self._cells: dict[str, Cell] = {}
        self._problem = env.problem
        self._process: subprocess.Popen[str] | None = None
        self._stopped = False

    def run(self) -> None:
        """Never raises for what is wrong with the environment: its cells say it."""
        if not (self._problem or self._stopped):
            try:
                self._look()
                self._listen()
            except OSError as error:  # no room, no memory for a process
                self._problem = f"the checks cannot be started: {error}"
        found = collections.Counter(cell.status for cell in self.in_order())
        seconds = sum(cell.seconds for cell in self._cells.values())
        counts = ", ".join(f"{n} {status}" for status, n in sorted(found.items()))
        self._say(f"{self.env}: {counts} ({seconds:.0f} s of checks)")

    def stop(self) -> None:
        """End it soon; called from another thread."""
        self._stopped = True
        if self._process is not None:
            self._process.terminate()  # it kills its cells

    def in_order(self) -> list[Cell]:
        """A cell for every check; those without a result are errors."""
        problem = self._problem or ("interrupted" if self._stopped else "it was not run")
        return [
            replace(self._cells[c.name], megatron=self.env.megatron, mindspeed=self.env.mindspeed)
            if c.name in self._cells
            else self._cell(c.name, "error", 0.0, problem)
            for c in self._checks
        ]

    def _cell(self, check: str, status: str, seconds: float, detail: str) -> Cell:
        return Cell(self.env.megatron, self.env.mindspeed, check, status, seconds, detail)

    def _folders(self) -> list[Path]:
        folders = [folder for folder in (self.env.path, self.env.mindspeed_path) if folder]
        if self.env.mindspeed and not is_installed("torch_npu"):
            folders.append(_STANDINS)
        return folders

    def _look(self) -> None:
        """Say how this Megatron differs from the tested ones. Those need not be looked at."""
        if self.env.is_tested:
            return
        path = [] if self.env.path is None else [self.env.path]
        seen = comparison.examine(path, cpu=True, timeout=_IMPORT_SECONDS)
        self.drift = [{"megatron": str(self.env), **item} for item in seen["drift"]]
        if self.drift:
            self._say(f"{self.env}: {comparison.describe(seen['drift'])}")

    def _listen(self) -> None:
        """Start the process and take its lines as they come."""
        command = [sys.executable, "-W", "ignore", "-m", "replay_patch.matrix.cells"]
        command += ["--checks", ",".join(check.name for check in self._checks)]
        command += ["--jobs", str(self._jobs), "--timeout", str(self._timeout)]
        command += ["--mindspeed"] if self.env.mindspeed else []
        # An empty folder to start in: with -m it comes first on the path, and may hold a megatron.
        # It is also where all temporary files go, because a killed process leaves them.
        with (
            tempfile.TemporaryDirectory(prefix="replay-patch-matrix-") as folder,
            subprocess.Popen(
                command,
                env=environ(self._folders()) | {"TMPDIR": folder},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,  # Ctrl-C is ours to pass on
            ) as process,
        ):
            self._process = process
            if self._stopped:
                process.terminate()
            said: collections.deque[str] = collections.deque(maxlen=_LINES_KEPT)
            assert process.stderr is not None
            reader = threading.Thread(target=said.extend, args=(process.stderr,), daemon=True)
            reader.start()
            self._take(process)
            process.wait()
            reader.join(_STOP_SECONDS)
        if len(self._cells) < len(self._checks) and not (self._problem or self._stopped):
            last = "".join(said).strip()
            self._problem = f"its process died (exit code {process.returncode}):\n{last}"

    def _take(self, process: "subprocess.Popen[str]") -> None:
        """Take the lines of the process; kill it if the next one is long overdue."""

        def overdue() -> None:
            self._problem = f"no sign of life for {limit:g} s, and killed"
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_SECONDS)
            process.kill()

        assert process.stdout is not None
        limit = _IMPORT_SECONDS
        while True:
            timer = threading.Timer(limit, overdue)
            timer.start()
            line = process.stdout.readline()
            timer.cancel()
            if not line.endswith("\n"):  # the end, maybe in the middle of one
                return
            self._note(json.loads(line))
            limit = self._timeout + 30.0  # the process itself kills what is late

    def _note(self, said: dict[str, Any]) -> None:
        if "problem" in said:
            self._problem = said["problem"]
        elif "check" in said:
            cell = self._cell(said["check"], said["status"], said["seconds"], said["detail"])
            self._cells[cell.check] = cell
            if cell.status in ("fail", "error"):
                first = cell.detail.partition("\n")[0]
                self._say(f"{self.env}: {cell.check} {cell.status}: {first}")
        else:
            expected = self.env.path
            if expected is not None and Path(said["folder"]).resolve() != expected.resolve():
                self._problem = (
                    f"megatron was imported from {said['folder']}, expected from {expected}; "
                    "remove the other one from PYTHONPATH, or uninstall it"
                )
                self.stop()
                return
            mindspeed = self.env.mindspeed
            if mindspeed == "installed":
                mindspeed = said["mindspeed"]
            self.env = replace(self.env, megatron=said["megatron"], mindspeed=mindspeed)
