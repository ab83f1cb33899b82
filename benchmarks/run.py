"""All benchmarks, and docs/performance.md made from them: `make bench`."""

import json
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import timing
import torch

from replay_patch.matrix.environments import cache_dir

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "performance.md"
RELEASES = ("0.12.1", "0.14.0", "0.16.1", "0.19.2")
VERL = "0.9.1"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        startup = run("startup.py", Path(folder) / "startup.json")
        verl = ["--verl", str(peer())]
        routers = [run("router.py", Path(folder) / f"{r}.json", r, *verl) for r in RELEASES]
        schedules = [run("schedule.py", Path(folder) / f"s{r}.json", r) for r in RELEASES]
    PAGE.write_text(page(startup, routers, schedules))
    print(f"wrote {PAGE}")


def run(script: str, out: Path, *args: str) -> Any:
    print(f"{script} {' '.join(args)}", flush=True)
    command = [sys.executable, "-W", "ignore", str(HERE / script), *args, "--json", str(out)]
    subprocess.run(command, check=True)
    return json.loads(out.read_text())


def peer() -> Path:
    """verl from PyPI, without what it depends on: only its replay patch is loaded."""
    folder = cache_dir() / f"verl-{VERL}"
    if not (folder / "verl").is_dir():
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder)]
        subprocess.run([*pip, f"verl=={VERL}"], check=True)
    return folder


def page(
    startup: dict[str, Any], routers: list[dict[str, Any]], schedules: list[dict[str, Any]]
) -> str:
    """The text of docs/performance.md."""
    lines = [
        "# Performance",
        "",
        f"Made by `make bench` on {time.strftime('%Y-%m-%d')}: {timing.machine()}; Python "
        f"{platform.python_version()}, torch {torch.__version__}. Times are medians. Ratios are "
        "taken within rounds in which every variant runs once, and given as median (25 % ... "
        "75 %); on a shared machine only they mean something. `native again` is native against "
        "itself: the noise of the measurement.",
        "",
        "## What the plugin adds to `import torch`",
        "",
        "| | CPU ms (25 % ... 75 %) | CPU ms in our entry point | modules | ours |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, row in startup.items():
        lines.append(
            f"| {name} | {row['cpu']:.0f} ({row['cpu low']:.0f} ... {row['cpu high']:.0f}) | "
            f"{row['ours']:.2f} | {row['modules']} | {len(row['our modules'])} |"
        )
    lines += [
        "",
        "## One router call",
        "",
        "T=4096 tokens, E=128 experts, K=8, forward, no holes. Our targets are checked when they "
        "are set (once for all the calls that use them), which has a row of its own. Peers check "
        "nothing; they are compared with our replay: above 1, they are slower.",
    ]
    for result in routers:
        lines += ["", f"### Megatron-core {result['release']}", ""]
        lines += ["| | fp32 ms | fp32 ratio | bf16 ms | bf16 ratio |"]
        lines += ["| --- | --- | --- | --- | --- |"]
        for fp32, bf16 in zip(*result["results"].values(), strict=True):
            lines.append(f"| {fp32[0]} | {cells(fp32)} | {cells(bf16)} |")
    lines += [
        "",
        "On 0.12 verl's patch replaces the routing function by a shorter one of its own, which "
        "does not count tokens per expert, and so has no auxiliary loss there; ours runs the "
        "release's own function.",
    ]
    lines += [
        "",
        "## One schedule",
        "",
        "48 MoE layers, full recompute, two microbatches, tensors of a few bytes: `replaying()` "
        "against native. The Python of a router call is that of our path with tensors that do "
        "nothing; the ids held are those of one microbatch in flight (rows x layers x top-k).",
        "",
        "| Megatron-core | native ms | replaying | native again | us, forward | us, recompute "
        "| bytes held |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for result in schedules:
        shown = [
            "{2:.3f} x native ({1:.3f} ... {3:.3f})".format(*result["schedule"][name])
            for name in ("replaying", "native again")
        ]
        native = result["schedule"]["native"][0]
        lines.append(
            f"| {result['release']} | {native:.0f} | {' | '.join(shown)} | "
            f"{result['first']:.2f} | {result['again']:.2f} | {result['bytes']} |"
        )
    return "\n".join(lines) + "\n"


def cells(row: list[Any]) -> str:
    _, ms, base, (low, middle, high) = row
    return f"{ms:.2f} | {middle:.3f} x {base} ({low:.3f} ... {high:.3f})"


if __name__ == "__main__":
    main()
