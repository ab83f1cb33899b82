"""Run all tests: those without Megatron once, and the release tests on each Megatron-core release.

    python tests/run.py [--releases 0.12.1,0.19.2 | all] [--jobs 2] [-- pytest arguments]

Releases are downloaded once into the cache of `replay_patch.matrix.environments`. The last line is
the sum over all runs.
"""

import argparse
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from replay_patch.matrix.environments import TESTED_RELEASES, environment

TESTS = Path(__file__).parent
ROOT = TESTS.parent
# The oldest, and the newest patch of each minor release.
DEFAULT_RELEASES = (
    "0.12.0 0.12.3 0.13.1 0.14.0 0.15.3 0.16.1 0.17.1 0.18.2 0.19.2".split()  # noqa: SIM905
)
COUNTS = re.compile(r"(\d+) (passed|failed|errors?|skipped|xfailed|xpassed)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--releases", default=",".join(DEFAULT_RELEASES))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("pytest", nargs="*", help="arguments for every pytest")
    args = parser.parse_args()
    releases = TESTED_RELEASES if args.releases == "all" else args.releases.split(",")

    for release in releases:  # one after the other: downloads show their own errors
        environment(release)
    runs = [("unit", None), *((f"megatron-core {r}", r) for r in releases)]
    with ThreadPoolExecutor(args.jobs) as pool:
        results = list(pool.map(lambda run: _pytest(*run, args.pytest), runs))

    total: dict[str, int] = {}
    for (name, _), (code, output) in zip(runs, results, strict=True):
        counts = {word.rstrip("s"): int(n) for n, word in COUNTS.findall(output.splitlines()[-1])}
        if code and not counts.get("failed"):
            counts["failed"] = counts.pop("error", 0) or 1
        for word, n in counts.items():
            total[word] = total.get(word, 0) + n
        print(f"{name:24}{', '.join(f'{n} {word}' for word, n in counts.items())}")
    print(f"{total.get('passed', 0)} passed, {total.get('failed', 0)} failed", end="")
    print(f", {total['skipped']} skipped" if total.get("skipped") else "")
    return 1 if any(code for code, _ in results) else 0


def _pytest(name: str, release: str | None, extra: list[str]) -> tuple[int, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("REPLAY_PATCH")}
    if release is not None:
        path = [str(environment(release)), *filter(None, [env.get("PYTHONPATH")])]
        env.update(PYTHONPATH=os.pathsep.join(path), REPLAY_PATCH="1")
    folder = TESTS / ("unit" if release is None else "release")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder), *extra]
    done = subprocess.run(command, env=env, cwd=ROOT, text=True, capture_output=True)
    output = (done.stdout + done.stderr).strip() or "no output"
    # One write, so that two runs do not mix their lines.
    shown = output if done.returncode else output.splitlines()[-1]
    print(f"--- {name}\n{shown}", flush=True)
    return done.returncode, done.stdout.strip() or "1 failed"


if __name__ == "__main__":
    sys.exit(main())
