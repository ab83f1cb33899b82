"""Interleaved timing: on a shared machine only pairs taken side by side can be compared."""

import gc
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from replay_patch.matrix.environments import environment

Variant = Callable[[], Callable[[], Any]]
"""Prepares (untimed) and returns what is timed."""


def interleaved(variants: dict[str, Variant], rounds: int) -> dict[str, list[float]]:
    """Seconds of one call of each variant; all variants in every round, in turning order."""
    taken: dict[str, list[float]] = {name: [] for name in variants}
    names = list(variants)
    for round_ in range(rounds + 1):
        gc.collect()
        gc.disable()
        for name in names[round_ % len(names) :] + names[: round_ % len(names)]:
            call = variants[name]()
            start = time.perf_counter()
            call()
            seconds = time.perf_counter() - start
            if round_:  # the first round warms up
                taken[name].append(seconds)
        gc.enable()
    return taken


def ratios(taken: dict[str, list[float]], name: str, base: str) -> tuple[float, float, float]:
    """Quartiles (25 %, median, 75 %) of the ratio name/base within each round."""
    pairs = [a / b for a, b in zip(taken[name], taken[base], strict=True)]
    low, middle, high = statistics.quantiles(pairs, n=4)
    return low, middle, high


def on_release(release: str, **env: str) -> None:
    """Start this script again with a Megatron-core release on the path, unless it is there."""
    folder = str(environment(release))
    if folder not in sys.path:
        path = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
        env = os.environ | {"PYTHONPATH": path} | env
        os.execve(sys.executable, [sys.executable, *sys.argv], env)


def machine() -> str:
    """The processor, as the operating system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = {line.split(":")[1].strip() for line in lines if line.startswith("model name")}
        cores = sum(line.startswith("processor") for line in lines)
    except OSError:
        return platform.processor() or platform.machine()
    return f"{', '.join(sorted(names)) or platform.machine()}, {cores} cores"
