"""Run all tests: those without Megatron, and the others on each Megatron-core release.

    python tests/run.py [--releases 0.12.1,0.19.2 | all] [--jobs 2] [-- pytest arguments]
    python tests/run.py --mindspeed DIR[=MEGATRON]    # only the tests beside MindSpeed, also on it

They run on the checkout (an editable install); the unit tests on the wheel built from it, and
`release` on one release also on that. Releases are downloaded once into the cache of
`replay_patch.matrix.environments`.
The last line is the sum over all runs.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from helpers import virtual_environments

from replay_patch.matrix.environments import NEWEST, TESTED_RELEASES, environment
from replay_patch.matrix.planning import Environment, plan

TESTS = Path(__file__).parent.absolute()
ROOT = TESTS.parent
DEFAULT_RELEASES = (  # the oldest, and the newest patch of each minor release
    "0.12.0",
    "0.12.3",
    "0.13.1",
    "0.14.0",
    "0.15.3",
    "0.16.1",
    "0.17.1",
    "0.18.2",
    "0.19.2",
)
ONE_PROCESS_ONLY = ("0.12.3",)  # 0.12.0 is the same for process groups
WITH_MINDSPEED = ("0.12.3", "0.18.2")  # the oldest and the newest minor that a MindSpeed is for
COUNTS = re.compile(r"(\d+) (passed|failed|error|skipped|xfailed|xpassed)")


@dataclass(frozen=True)
class Run:
    """One pytest: a folder of tests, on a release or none, on the wheel or the checkout."""

    folder: str
    release: str | None = None
    wheel: Path | None = None  # the Python that has the wheel, in place of this one
    beside: Environment | None = None  # a MindSpeed checkout, with the Megatron to use

    def __str__(self) -> str:
        release = f" on megatron-core {self.release}" if self.release else ""
        release += f" on {self.beside}" if self.beside else ""
        return self.folder + release + (" (wheel)" if self.wheel else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--releases", default=",".join(DEFAULT_RELEASES))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("pytest", nargs="*", help="arguments for every pytest")
    parser.add_argument("--mindspeed", metavar="DIR[=MEGATRON]", help="see `make test-mindspeed`")
    args = parser.parse_args()
    if args.mindspeed:
        [beside] = plan(mindspeed_paths=[args.mindspeed])
        if beside.problem:
            parser.error(beside.problem)
        run = Run("on_mindspeed", beside=beside)
        return report([run], [run_pytest(run, args.pytest)])
    releases = TESTED_RELEASES if args.releases == "all" else args.releases.split(",")

    for release in {*releases, NEWEST}:  # one after the other: downloads show their own errors
        environment(release)
    with tempfile.TemporaryDirectory() as folder:
        wheel = install_wheel(Path(folder))
        runs = [Run("unit", wheel=wheel), Run("install"), Run("trainers"), Run("matrix")]
        runs += [Run("release", NEWEST, wheel)]
        # Two folders, two processes: `release` makes process groups, and so cannot fork ranks.
        for release in sorted(releases, key=lambda r: r not in (TESTED_RELEASES[0], NEWEST)):
            # These two first: they take longest (test_orders).
            folders = ["release"] if release in ONE_PROCESS_ONLY else ["release", "distributed"]
            runs += [Run(folder, release) for folder in folders]
        runs += [Run("on_mindspeed", release) for release in releases if release in WITH_MINDSPEED]
        with ThreadPoolExecutor(args.jobs) as pool:
            results = list(pool.map(lambda run: run_pytest(run, args.pytest), runs))
    return report(runs, results)


def install_wheel(folder: Path) -> Path:
    """Install the wheel of this checkout into an environment of its own; returns its Python."""
    build = ["-q", "--no-deps", "--no-build-isolation", "-w", str(folder), str(ROOT)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *build], check=True)
    python = virtual_environments.make(folder / "wheel")
    virtual_environments.pip_install(python, str(next(folder.glob("*.whl"))))
    return python


def run_pytest(run: Run, extra: Sequence[str]) -> tuple[int, str]:
    """(exit code, stdout) of one run. It is started outside the checkout's root, which would
    otherwise come first on the path and hide the wheel."""
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
    if run.release:
        env["REPLAY_PATCH"] = "1"
    options = ["-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml")]
    command = [str(run.wheel or sys.executable), "-m", "pytest", *options, f"--rootdir={ROOT}"]
    if run.wheel and run.release:  # what an installation could lack
        command += ["-m", "not mechanism", "-k", "test_exactness or test_replay or test_config"]
    started = time.monotonic()
    done = subprocess.run(
        [*command, str(TESTS / run.folder), *extra],
        env=env,
        cwd=TESTS,
        text=True,
        capture_output=True,
    )
    output = done.stdout.strip() or "no output"
    shown = output + done.stderr if done.returncode else output.splitlines()[-1]
    # One write, so that two runs do not mix their lines.
    print(f"{run}, {time.monotonic() - started:.0f} s: {shown}", flush=True)
    return done.returncode, done.stdout


def report(runs: Sequence[Run], results: Sequence[tuple[int, str]]) -> int:
    """Print one line per run and the sum; returns the exit code."""
    total: dict[str, int] = {}
    print()
    for run, (code, output) in zip(runs, results, strict=True):
        last = (output.strip().splitlines() or [""])[-1]
        counts = {word: int(n) for n, word in COUNTS.findall(last)}
        if code:  # an error in a fixture, or a pytest that died, is a failure too
            counts["failed"] = counts.get("failed", 0) + counts.pop("error", 0) or 1
        for word, n in counts.items():
            total[word] = total.get(word, 0) + n
        print(f"{run!s:40} {', '.join(f'{n} {word}' for word, n in counts.items())}")
    skipped = f", {total['skipped']} skipped" if total.get("skipped") else ""
    print(f"{total.get('passed', 0)} passed, {total.get('failed', 0)} failed{skipped}")
    return 1 if any(code for code, _ in results) else 0


if __name__ == "__main__":
    sys.exit(main())
