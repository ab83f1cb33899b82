"""`replay-patch demo`: what routing replay changes, on a real Megatron-core, in a minute on a CPU.

`run_demo` fetches the release and runs `replay_patch.demo.experiment` on it in a process of its
own, so that neither torch nor Megatron of the calling process is touched.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from replay_patch.errors import ReplayPatchError
from replay_patch.matrix import environments
from replay_patch.processes import child, environ

__all__ = ["format_demo", "plot_demo", "run_demo"]

MEASURES = {
    "router_decisions_differ": "router decisions that differ",
    "tokens_differ": "tokens with a decision that differs",
    "kl": "KL(rollout || trainer) per token",
    "extreme_tokens": "tokens with a probability ratio > 2",
}

# arXiv 2510.11370, Qwen3-30B-A3B between SGLang and Megatron. With replay the paper gives no share
# of differing decisions, and the share of extreme tokens only as an order of magnitude.
PAPER = {
    "router_decisions_differ": ("about 10 %", ""),
    "tokens_differ": ("94 %", ""),
    "kl": ("1.5e-03", "7.5e-04"),
    "extreme_tokens": ("", "about 10x fewer"),
}


def run_demo(
    megatron: str = "latest",
    seed: int = 0,
    cache: str | os.PathLike[str] | None = None,
    megatron_path: str | os.PathLike[str] | None = None,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Run the demo and return what it measured.

    Args:
        megatron: the release, downloaded once; "latest" is the newest tested one.
        seed: of weights, prompts and sampling.
        cache: where releases are kept; see `environments.cache_dir`.
        megatron_path: a folder that holds a `megatron` package, in place of a download.
        progress: called with one line at a time; by default they go to stderr.

    Returns:
        `megatron`, `seed`, `tokens`, `layers`, `captured` (share of router decisions replayed),
        `without_replay` and `with_replay` (each the keys of `MEASURES`, shares as fractions of
        1), `seconds`, and more about the job (`loss`, `sizes`, `torch`).

    Raises:
        ReplayPatchError: the release cannot be had, or the job failed (its last lines are shown).
    """
    started = time.monotonic()
    say = progress or _to_stderr
    if megatron_path is None:
        say(f"Megatron-core {megatron} (downloaded at its first use)")
        folder = environments.environment(megatron, cache)
    else:
        folder = environments.checkout(megatron_path)
    result = _run_job(folder, seed, say)
    result["seconds"] = round(time.monotonic() - started, 1)
    return result


def format_demo(result: dict[str, Any]) -> str:
    """A result as plain text for somebody who sees it for the first time."""
    sizes, loss = result["sizes"], result["loss"]
    table: list[tuple[str, ...]] = [
        ("", "without replay", "with replay", "R3 paper, without", "with")
    ]
    for key, label in MEASURES.items():
        ours = [_number(key, result[run][key]) for run in ("without_replay", "with_replay")]
        table.append((label, *ours, *PAPER[key]))
    rows = ["{:36}{:>15}{:>13}{:>19}{:>16}".format(*row).rstrip() for row in table]
    return "\n".join(
        [
            f"replay-patch demo on Megatron-core {result['megatron']}, seed {result['seed']}, "
            f"{result['seconds']:.0f} s",
            "",
            f"A small mixture-of-experts GPT ({sizes['layers']} layers, {sizes['experts']} experts,"
            f" {sizes['topk']} chosen per token) with its weights rounded to",
            f"bf16 played the rollout engine and wrote {sizes['sequences']} responses. The same "
            "weights in fp32 then trained on them,",
            "once choosing experts anew and once replaying the experts that the rollout chose.",
            "",
            *rows,
            "",
            f"{100 * result['captured']:.1f} % of the {result['tokens'] * result['layers']} router "
            "decisions were captured and replayed; the last token of a response is",
            "never fed to the rollout engine, has no route, and routes by itself.",
            f"Loss over {sizes['steps']} training steps: "
            f"{_series(loss['without_replay'])} without replay, "
            f"{_series(loss['with_replay'])} with it.",
            "",
            "R3 paper: arXiv 2510.11370, a 30B model between SGLang and Megatron. This model is "
            "tiny and random,",
            "so compare the directions, not the digits.",
        ]
    )


def plot_demo(result: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Draw the four measures without and with replay to an image file.

    Raises:
        ReplayPatchError: matplotlib is missing, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ReplayPatchError(
            "plotting needs matplotlib: pip install 'replay-patch[plot]'"
        ) from error
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    figure.suptitle(
        f"Rollout (bf16) against trainer (fp32) on Megatron-core {result['megatron']}, "
        f"seed {result['seed']}"
    )
    for axes, (key, label) in zip(figure.subplots(1, len(MEASURES)), MEASURES.items(), strict=True):
        values = [result[run][key] for run in ("without_replay", "with_replay")]
        bars = axes.bar(["without replay", "with replay"], values, color=["tab:red", "tab:blue"])
        axes.bar_label(bars, [_number(key, value) for value in values])
        axes.set_title(label, fontsize=9)
        axes.margins(y=0.15)
        axes.set_ylim(bottom=0)
        axes.set_yticks([])
        axes.spines[["top", "left", "right"]].set_visible(False)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:  # ValueError: an ending that is no image format
        raise ReplayPatchError(f"the plot cannot be written to {path}: {error}") from error


def _number(key: str, value: float) -> str:
    if value == 0:
        return "0"
    return f"{value:.1e}" if key == "kl" else f"{100 * value:.2g} %"


def _series(values: list[float]) -> str:
    return f"{values[0]:+.3f} to {values[-1]:+.3f}"


# ----------------------------------------------------------------------------------- the process


def _run_job(megatron: Path, seed: int, progress: Callable[[str], None]) -> dict[str, Any]:
    arguments = ("--seed", str(seed), "--megatron", str(megatron))
    result: dict[str, Any] | None = None
    with child("replay_patch.demo.experiment", *arguments, env=environ([megatron])) as job:
        while (message := job.next_message()) is not None:
            if "progress" in message:
                progress(message["progress"])
            else:
                result = message["result"]
    if job.exit_code == 0 and result is not None:
        return result
    shown = "\n".join(f"  {line}" for line in job.last_lines())
    raise ReplayPatchError(
        f"demo: the job on {megatron} ended with exit code {job.exit_code}; it said:\n{shown}"
    )


def _to_stderr(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
