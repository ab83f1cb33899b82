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

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

from helpers import peer_packages  # noqa: E402

PAGE = HERE.parent / "docs" / "performance.md"
RELEASES = ("0.12.1", "0.14.0", "0.16.1", "0.19.2")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        startup = run("startup.py", Path(folder) / "startup.json")
        routes = run("routes.py", Path(folder) / "routes.json")
        verl = ["--verl", str(peer_packages.folder("verl"))]
        routers = [run("router.py", Path(folder) / f"{r}.json", r, *verl) for r in RELEASES]
        schedules = [run("schedule.py", Path(folder) / f"s{r}.json", r) for r in RELEASES]
    PAGE.write_text(page(startup, routers, schedules, routes))
    print(f"wrote {PAGE}")


def run(script: str, out: Path, *args: str) -> Any:
    print(f"{script} {' '.join(args)}", flush=True)
    command = [sys.executable, "-W", "ignore", str(HERE / script), *args, "--json", str(out)]
    subprocess.run(command, check=True)
    return json.loads(out.read_text())


def page(
    startup: dict[str, Any],
    routers: list[dict[str, Any]],
    schedules: list[dict[str, Any]],
    routes: dict[str, Any],
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
        "",
        *schedules_section(schedules),
        "",
        *routes_section(routes),
    ]
    return "\n".join(lines) + "\n"


def schedules_section(schedules: list[dict[str, Any]]) -> list[str]:
    lines = [
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
    return lines


def routes_section(result: dict[str, Any]) -> list[str]:
    versions = peer_packages.VERSIONS
    lines = [
        "## Bringing routes to the routers",
        "",
        "The set-up of one microbatch: B sequences of 4096 to 8192 tokens, packed, L=48 layers, "
        "K=8, E=128, one thread, no parallelism. From the routes as the trainer has them to one "
        "tensor for each router: ours makes the layout and copies the ids once, in uint8; SkyRL "
        f"{versions['skyrl']} and verl {versions['verl']}, from PyPI, on Megatron-core "
        f"{result['release']}, run their public replay paths. All hand the same ids to each "
        "router. SkyRL's worker casts each microbatch to int32 before; `given int32` leaves that "
        "out. verl's ids are int64 already; ours become int64 one layer at a time, when its "
        "router is called, which `and every layer's index` includes. Peers check nothing; ours "
        f"were checked when the `Routes` were made, which took {result['checking']:.1f} ms for a "
        "sequence of 8192 tokens, once.",
    ]
    for row in result["set-up"]:
        lines += [
            "",
            f"### B={row['batch']}, {row['tokens']} tokens",
            "",
            "| | ms | ratio to ours | held until the backward | of int32 |",
            "| --- | --- | --- | --- | --- |",
        ]
        for name, ms in row["ms"].items():
            low, middle, high = row["ratio"][name]
            held = row["held"][name]
            lines.append(
                f"| {name} | {ms:.2f} | {middle:.2f} ({low:.2f} ... {high:.2f}) | "
                f"{held / 1e6:.1f} MB | {held / row['int32']:.3f} |"
            )
    lines += [
        "",
        "### One sequence on the wire",
        "",
        "8192 x 48 x 8 ids of 128 experts, encoded and decoded. Ours are validated when decoded "
        "(sizes, checksum, range, duplicates); so is `into Routes`.",
        "",
        "| | ms | times as fast as JSON lists | ratio to unchecked base64 | MB |",
        "| --- | --- | --- | --- | --- |",
    ]
    codec = result["codec"]
    for name, ms in codec["ms"].items():
        middle = f"{codec['ratio'][name][1]:.2f}" if name in codec["ratio"] else ""
        faster = codec["ms"]["JSON lists"] / ms
        size = codec["bytes"][name] / 1e6
        lines.append(f"| {name} | {ms:.2f} | {faster:.1f} | {middle} | {size:.2f} |")
    lines += [
        "",
        "### The row map",
        "",
        "Nanoseconds per token for making a `TokenLayout`. It knows nothing of layers and top-k.",
        "",
        "| tokens | " + " | ".join(result["row map"][0]["ns per token"]) + " |",
        "| --- | --- | --- | --- |",
    ]
    for row in result["row map"]:
        times = " | ".join(f"{ns:.1f}" for ns in row["ns per token"].values())
        lines.append(f"| {row['tokens']} | {times} |")
    return lines


def cells(row: list[Any]) -> str:
    _, ms, base, (low, middle, high) = row
    return f"{ms:.2f} | {middle:.3f} x {base} ({low:.3f} ... {high:.3f})"


if __name__ == "__main__":
    main()
