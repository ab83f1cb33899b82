"""What the plugin adds to `import torch`: absent, installed and off, on.

    python benchmarks/startup.py [--rounds 20] [--json FILE]

Each start is a fresh interpreter. Wall time on a shared machine is noisy, so CPU time of the
process, modules loaded and the CPU time inside our own entry point are given, too.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from helpers import virtual_environments  # noqa: E402

MEASURE = """
import json, sys, time
wall, cpu = time.perf_counter(), time.process_time()
own = [0.0]
try:
    from replay_patch import autoload
except ImportError:
    pass
else:
    def timed(load):
        def timed_load(*args):
            start = time.process_time()
            load(*args)
            own[0] += time.process_time() - start
        return timed_load
    autoload.load = timed(autoload.load)
import torch
print(json.dumps({
    "wall": time.perf_counter() - wall,
    "cpu": time.process_time() - cpu,
    "ours": own[0],
    "modules": len(sys.modules),
    "our modules": sorted(m for m in sys.modules if m.split(".")[0] == "replay_patch"),
}))
"""
VARIANTS = {"absent": ("without", ""), "off": ("with", "0"), "on": ("with", "1")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        pythons = {
            name: virtual_environments.make(Path(folder) / name) for name in ("without", "with")
        }
        build = ["wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, str(ROOT)]
        subprocess.run([sys.executable, "-m", "pip", *build], check=True)
        virtual_environments.pip_install(pythons["with"], str(next(Path(folder).glob("*.whl"))))
        taken: dict[str, list[dict[str, Any]]] = {name: [] for name in VARIANTS}
        for round_ in range(args.rounds + 1):
            for name, (where, switch) in VARIANTS.items():
                found = start(pythons[where], switch)
                if round_:  # the first round fills caches
                    taken[name].append(found)
    rows = {name: summary(found) for name, found in taken.items()}
    for name, row in rows.items():
        print(
            f"{name:8} wall {row['wall']:7.1f} ms  cpu {row['cpu']:7.1f} ms "
            f"({row['cpu low']:.1f} ... {row['cpu high']:.1f})  ours {row['ours']:5.2f} ms  "
            f"modules {row['modules']}  of ours {len(row['our modules'])}"
        )
    if args.json:
        args.json.write_text(json.dumps(rows))


def start(python: Path, switch: str) -> dict[str, Any]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("REPLAY_PATCH", "PYTHONPATH"))}
    done = subprocess.run(
        [str(python), "-c", MEASURE],
        env=env | {"REPLAY_PATCH": switch},
        cwd=python.parent,  # the checkout is not to be found
        text=True,
        capture_output=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians in ms, and the quartiles of the CPU time."""
    low, middle, high = (1e3 * q for q in statistics.quantiles([f["cpu"] for f in found], n=4))
    return {
        "wall": 1e3 * statistics.median(f["wall"] for f in found),
        "cpu": middle,
        "cpu low": low,
        "cpu high": high,
        "ours": 1e3 * statistics.median(f["ours"] for f in found),
        "modules": found[0]["modules"],
        "our modules": found[0]["our modules"],
    }


if __name__ == "__main__":
    main()
