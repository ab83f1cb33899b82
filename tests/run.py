"""Run the tests: those without Megatron, and the others on each Megatron-core release.

    python tests/run.py                               # a newcomer's: minutes, three releases
    python tests/run.py --releases all                # that and everything else, as CI
    python tests/run.py --releases 0.12.1,0.19.2      # a newcomer's tests on these releases
    python tests/run.py --mindspeed DIR[=MEGATRON]    # only the tests beside MindSpeed, also on it

What follows `--` is for every pytest. The tests run on the checkout (an editable install); the unit
tests on the wheel built from it. Releases are downloaded once into the cache of
`replay_patch.matrix.environments`. The last line is the sum over all runs.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from helpers import virtual_environments

from replay_patch.matrix.environments import NEWEST, TESTED_RELEASES, environment
from replay_patch.matrix.planning import Environment, plan

TESTS = Path(__file__).parent.absolute()
ROOT = TESTS.parent
OLDEST = TESTED_RELEASES[0]
FEW_RELEASES = (OLDEST, "0.16.1", NEWEST)
ONE_PROCESS_ONLY = ("0.12.3",)  # 0.12.0 is the same for process groups
WITH_MINDSPEED = ("0.12.3", "0.18.2")  # the oldest and the newest minor that a MindSpeed is for
HEARTBEAT_SECONDS = 30.0
NO_TESTS = 5  # the exit code of a pytest that had none
COUNTS = re.compile(r"(\d+) (passed|failed|error|skipped|xfailed|xpassed)")


@dataclass(frozen=True)
class Run:
    """One pytest: a folder of tests, on a release or none, on the wheel or the checkout."""

    folder: str
    release: str | None = None
    wheel: Path | None = None  # the Python that has the wheel, in place of this one
    beside: Environment | None = None  # a MindSpeed checkout, with the Megatron to use
    options: tuple[str, ...] = ()

    def __str__(self) -> str:
        release = f" on megatron-core {self.release}" if self.release else ""
        release += f" on {self.beside}" if self.beside else ""
        return self.folder + release + (" (wheel)" if self.wheel else "")


@dataclass(frozen=True)
class Result:
    """What became of one run."""

    exit_code: int
    output: str
    seconds: float

    @property
    def counts(self) -> dict[str, int]:
        last = (self.output.strip().splitlines() or [""])[-1]
        counts = {word: int(n) for n, word in COUNTS.findall(last)}
        if self.exit_code:  # an error in a fixture, or a pytest that died, is a failure too
            counts["failed"] = counts.get("failed", 0) + counts.pop("error", 0) or 1
        return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--releases", help="'all' for everything, or versions with commas")
    parser.add_argument("--jobs", type=int, default=2, help="pytests at once")
    parser.add_argument("--mindspeed", metavar="DIR[=MEGATRON]", help="see `make test-mindspeed`")
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="the counts as JSON; without FILE to stdout, and all else to stderr",
    )
    parser.add_argument("pytest", nargs="*", help="arguments for every pytest")
    args = parser.parse_args()
    out = sys.stderr if args.json == "-" else sys.stdout
    with tempfile.TemporaryDirectory() as folder:
        if args.mindspeed:
            [beside] = plan(mindspeed_paths=[args.mindspeed])
            if beside.problem:
                parser.error(beside.problem)
            runs = [Run("on_mindspeed", beside=beside)]
        elif args.releases == "all":
            runs = everything(download(TESTED_RELEASES), install_wheel(Path(folder)))
        else:
            releases = args.releases.split(",") if args.releases else FEW_RELEASES
            runs = newcomers(download(releases), install_wheel(Path(folder)))
        progress = Progress(runs, Path(folder), out)
        with ThreadPoolExecutor(args.jobs) as pool, progress:
            results = list(pool.map(lambda run: run_pytest(run, args.pytest, progress), runs))
    if args.json:
        text = json.dumps(as_json(runs, results), indent=1) + "\n"
        sys.stdout.write(text) if args.json == "-" else Path(args.json).write_text(text)
    return report(runs, results, out)


# --- what is run --------------------------------------------------------------------------------


def newcomers(releases: Sequence[str], wheel: Path) -> list[Run]:
    """Every contract, in minutes: few cases of each test, and no trainers to download."""
    few = ("--few",)
    runs = [Run("release", release, options=few) for release in releases]
    runs += [Run("unit", wheel=wheel, options=few), Run("install", options=few)]
    runs += [Run("matrix", options=few)]
    # Sessions on ranks take longest, and ask little of the releases between.
    ends = dict.fromkeys((releases[0], releases[-1]))
    return runs + [Run("distributed", release, options=few) for release in ends]


def everything(releases: Sequence[str], wheel: Path) -> list[Run]:
    """All tests, the longest runs first."""
    runs = [Run("matrix"), Run("release", OLDEST), Run("trainers"), Run("release", NEWEST)]
    runs += [Run("unit", wheel=wheel), Run("install")]
    installed = ("-m", "not mechanism", "-k", "test_exactness or test_replay or test_config")
    runs += [Run("release", NEWEST, wheel, options=installed)]  # what an installation could lack
    # Two folders, two processes: `release` makes process groups, and so cannot fork ranks.
    runs += [Run("distributed", r) for r in releases if r not in ONE_PROCESS_ONLY]
    runs += [Run("release", r) for r in releases if r not in (OLDEST, NEWEST)]
    return runs + [Run("on_mindspeed", release) for release in WITH_MINDSPEED]


def download(releases: Sequence[str]) -> Sequence[str]:
    for release in dict.fromkeys((*releases, NEWEST)):  # one by one: each shows its own error
        environment(release)
    return releases


def install_wheel(folder: Path) -> Path:
    """Install the wheel of this checkout into an environment of its own; returns its Python."""
    build = ["-q", "--no-deps", "--no-build-isolation", "-w", str(folder), str(ROOT)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *build], check=True)
    python = virtual_environments.make(folder / "wheel")
    virtual_environments.pip_install(python, str(next(folder.glob("*.whl"))))
    return python


# --- running ------------------------------------------------------------------------------------


@dataclass
class Progress:
    """Says when a run starts and ends, and every half minute how far the others are."""

    runs: Sequence[Run]
    folder: Path
    out: Any
    _started: dict[int, float] = field(default_factory=dict)
    _finished: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stopped: threading.Event = field(default_factory=threading.Event)
    _printed: float = field(default_factory=time.monotonic)

    def __enter__(self) -> "Progress":
        threading.Thread(target=self._beat, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopped.set()

    def file(self, run: Run) -> Path:
        """Where the pytest of a run writes "finished/all" tests (see conftest.py)."""
        return self.folder / f"progress-{self.runs.index(run)}"

    def start(self, run: Run) -> None:
        with self._lock:
            self._started[self.runs.index(run)] = time.monotonic()
            self._print(f"started: {run}")

    def finish(self, run: Run, result: Result) -> None:
        counts = ", ".join(f"{n} {word}" for word, n in result.counts.items()) or "no tests"
        with self._lock:
            del self._started[self.runs.index(run)]
            self._finished += 1
            number = f"[{self._finished}/{len(self.runs)}]"
            self._print(f"{number} {run}: {counts}, {result.seconds:.0f} s{self._running()}")
            if result.exit_code:
                self._print(result.output)

    def _running(self) -> str:
        running = [self._percent(self.runs[index]) for index in self._started]
        return f"; still running: {', '.join(running)}" if running else ""

    def _percent(self, run: Run) -> str:
        try:
            finished, count = map(int, self.file(run).read_text().split("/"))
        except (OSError, ValueError):  # it collects, or writes just now
            return f"{run} (starting)"
        return f"{run} {100 * finished // max(count, 1)} %"

    def _beat(self) -> None:
        while not self._stopped.wait(1.0):
            with self._lock:
                if self._started and time.monotonic() - self._printed >= HEARTBEAT_SECONDS:
                    self._print(f"[{self._finished}/{len(self.runs)}]{self._running()[1:]}")

    def _print(self, text: str) -> None:
        self._printed = time.monotonic()
        print(text, file=self.out, flush=True)


def run_pytest(run: Run, extra: Sequence[str], progress: Progress) -> Result:
    """It is started outside the checkout's root, which would otherwise come first on the path and
    hide the wheel."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("REPLAY_PATCH")}
    path = [str(environment(run.release))] if run.release else []
    if run.beside:
        path = [str(run.beside.path)]
        env["MINDSPEED_PATH"] = str(run.beside.mindspeed_path)
    else:
        env.pop("MINDSPEED_PATH", None)
    path += filter(None, [env.get("PYTHONPATH")])
    env["PYTHONPATH"] = os.pathsep.join(path)
    env["TESTED_INSTALLATION"] = str(run.wheel.parents[1] if run.wheel else ROOT)
    env["TEST_PROGRESS"] = str(progress.file(run))
    if run.release:
        env["REPLAY_PATCH"] = "1"
    command = [str(run.wheel or sys.executable), "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-c", str(ROOT / "pyproject.toml"), f"--rootdir={ROOT}", *run.options, *extra]
    progress.start(run)
    started = time.monotonic()
    done = subprocess.run(
        [*command, str(TESTS / run.folder)], env=env, cwd=TESTS, text=True, capture_output=True
    )
    # Errors come first: the last line of pytest's own output has the counts.
    output = f"{done.stderr if done.returncode else ''}{done.stdout}".strip() or "no output"
    chosen = extra and done.returncode == NO_TESTS  # none here of those asked for, as by -k
    result = Result(0 if chosen else done.returncode, output, time.monotonic() - started)
    progress.finish(run, result)
    return result


# --- the end ------------------------------------------------------------------------------------


def total(results: Sequence[Result]) -> Counter[str]:
    counts: Counter[str] = Counter(passed=0, failed=0)
    for result in results:
        counts.update(result.counts)
    return counts


def as_json(runs: Sequence[Run], results: Sequence[Result]) -> dict[str, Any]:
    rows = [
        {
            "run": str(run),
            "folder": run.folder,
            "megatron": run.release,
            "wheel": run.wheel is not None,
            "exit_code": result.exit_code,
            "seconds": round(result.seconds, 1),
            **result.counts,
        }
        for run, result in zip(runs, results, strict=True)
    ]
    return {"schema": 1, "runs": rows, **total(results)}


def report(runs: Sequence[Run], results: Sequence[Result], out: Any) -> int:
    """Print one line per run and the sum; returns the exit code."""
    print(file=out)
    for run, result in zip(runs, results, strict=True):
        counts = ", ".join(f"{n} {word}" for word, n in result.counts.items())
        print(f"{run!s:40} {result.seconds:5.0f} s  {counts}", file=out)
    counts = total(results)
    skipped = f", {counts['skipped']} skipped" if counts["skipped"] else ""
    print(f"{counts['passed']} passed, {counts['failed']} failed{skipped}", file=out)
    return 1 if any(result.exit_code for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
