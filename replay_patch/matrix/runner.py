"""Run checks on Megatrons, one after the other or several at once, and collect the cells. An
environment (a Megatron, with or without MindSpeed) is a process of `cells`, each cell another."""

import collections
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from replay_patch.drift import comparison
from replay_patch.matrix import fingerprints_on_bed
from replay_patch.matrix.planning import Environment, Progress, is_installed
from replay_patch.matrix.registry import Check
from replay_patch.processes import Child, child, environ

__all__ = ["Cell", "Matrix", "run"]

_IMPORT_SECONDS = 300.0  # Megatron with all its optional packages, on a slow file system
_OVERDUE_SECONDS = 30.0  # a process that lives kills a check that is late itself
_POLL_SECONDS = 0.2
_LINES_SHOWN = 12
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
    """Why it is no "pass", in a few lines."""


@dataclass
class Matrix:
    """All cells, by environment and in the order of the checks, and what differs from the tested
    releases: items as `drift.comparison.compare` gives them, with the key `megatron`."""

    cells: list[Cell] = field(default_factory=list)
    drift: list[dict[str, str]] = field(default_factory=list)
    interrupted: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The JSON of `replay-patch matrix --json`."""
        return {"schema": 1, "cells": [asdict(c) for c in self.cells], "drift": self.drift}

    @property
    def green(self) -> bool:
        """Whether some cell passed, and none is a fail or an error."""
        statuses = {cell.status for cell in self.cells}
        return "pass" in statuses and not statuses & {"fail", "error"}


def run(
    environments: Sequence[Environment],
    checks: Sequence[Check],
    *,
    jobs: int | None = None,
    timeout: float = 60.0,
    say: Progress = print,
) -> Matrix:
    """Run every check in every environment. Ctrl-C ends it with the cells that are finished.

    Args:
        jobs: processes at once; None: as many as there are processors.
        timeout: of one cell, in seconds.
        say: called with a line for each environment that is done, and for each red cell.
    """
    jobs = jobs or os.cpu_count() or 1
    at_once = max(1, min(jobs, len(environments)))
    share = max(1, jobs // at_once)
    runs = [_EnvironmentRun(env, checks, share, timeout, say) for env in environments]
    interrupted = False
    with ThreadPoolExecutor(at_once) as pool:
        futures = [pool.submit(environment_run.run) for environment_run in runs]
        try:
            while wait(futures, _POLL_SECONDS).not_done:
                pass  # another thread may get the signal, and would not wake a waiting one
        except KeyboardInterrupt:
            interrupted = True
            say("interrupted: stopping")
            for environment_run in runs:
                environment_run.stop()
        for future in futures:
            future.result()
    drift = [item for environment_run in runs for item in environment_run.drift]
    return Matrix(_cells_of_all(runs), drift, interrupted)


def _cells_of_all(runs: Sequence["_EnvironmentRun"]) -> list[Cell]:
    """By environment; those of one version (a release, a fork) say how they were asked for, too."""
    environments = [environment_run.env for environment_run in runs]
    count = collections.Counter((env.megatron, env.mindspeed) for env in environments)
    cells = []
    for environment_run, env in zip(runs, environments, strict=True):
        megatron, mindspeed = env.megatron, env.mindspeed
        if count[megatron, mindspeed] > 1:
            megatron = f"{megatron} ({environment_run.asked})"
            mindspeed = mindspeed and f"{mindspeed} ({env.mindspeed_path or 'installed'})"
        cells += [
            replace(cell, megatron=megatron, mindspeed=mindspeed)
            for cell in environment_run.in_order()
        ]
    return cells


class _EnvironmentRun:
    """One environment: its process, and the cells that it has finished."""

    def __init__(
        self, env: Environment, checks: Sequence[Check], jobs: int, timeout: float, say: Progress
    ) -> None:
        self.env, self.asked = env, env.megatron
        self.drift: list[dict[str, str]] = []
        self._checks = [check for check in checks if env.mindspeed or not check.mindspeed]
        self._jobs, self._timeout, self._say = jobs, timeout, say
        self._cells: dict[str, Cell] = {}
        self._problem = env.problem
        self._process: Child | None = None
        self._stopped = False

    def run(self) -> None:
        """Run the checks. What is wrong with the environment is not raised: its cells say it."""
        if not (self._problem or self._stopped):
            try:
                self._compare_with_tested()
                self._run_checks()
            except OSError as error:  # no room, no memory for a process
                self._problem = f"the checks cannot be started: {error}"
        statuses = collections.Counter(cell.status for cell in self.in_order())
        seconds = sum(cell.seconds for cell in self._cells.values())
        counts = ", ".join(f"{n} {status}" for status, n in sorted(statuses.items()))
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

    def _compare_with_tested(self) -> None:
        """Say how this Megatron differs from the tested ones, if it is none of them."""
        if self.env.is_tested:
            return
        path = [] if self.env.path is None else [self.env.path]
        drift = fingerprints_on_bed.examine(path, timeout=_IMPORT_SECONDS)["drift"]
        self.drift = [{"megatron": str(self.env), **item} for item in drift]
        if drift:
            self._say(f"{self.env}: {comparison.describe(drift)}")

    def _run_checks(self) -> None:
        """Run the process of this environment and take its messages as they come."""
        arguments = ["--checks", ",".join(check.name for check in self._checks)]
        arguments += ["--jobs", str(self._jobs), "--timeout", str(self._timeout)]
        arguments += ["--mindspeed"] if self.env.mindspeed else []
        env, limit = environ(self._folders()), _IMPORT_SECONDS
        with child("replay_patch.matrix.cells", *arguments, env=env, own_session=True) as process:
            self._process = process
            if self._stopped:
                process.terminate()
            try:
                while (message := process.next_message(limit)) is not None:
                    self._take(message)
                    limit = self._timeout + _OVERDUE_SECONDS
            except TimeoutError:
                self._problem = f"no sign of life for {limit:g} s, and killed"
        if len(self._cells) < len(self._checks) and not (self._problem or self._stopped):
            last = "\n".join(process.last_lines(_LINES_SHOWN))
            self._problem = f"its process died (exit code {process.exit_code}):\n{last}"

    def _take(self, message: dict[str, Any]) -> None:
        """Take what `cells` says: a problem, a finished cell, or what was imported."""
        if "problem" in message:
            self._problem = message["problem"]
        elif "check" in message:
            cell = self._cell(**message)
            self._cells[cell.check] = cell
            if cell.status in ("fail", "error"):
                first = cell.detail.partition("\n")[0]
                self._say(f"{self.env}: {cell.check} {cell.status}: {first}")
        else:
            expected, folder = self.env.path, message["folder"]
            if expected is not None and Path(folder).resolve() != expected.resolve():
                self._problem = (
                    f"megatron was imported from {folder}, expected from {expected}; "
                    "remove the other one from PYTHONPATH, or uninstall it"
                )
                self.stop()
                return
            mindspeed = self.env.mindspeed
            if mindspeed == "installed":
                mindspeed = message["mindspeed"]
            self.env = replace(self.env, megatron=message["megatron"], mindspeed=mindspeed)
