"""What the demo measured: as text for people, and as a plot."""

import os
from typing import Any

from replay_patch.errors import ReplayPatchError

__all__ = ["MEASURES", "format_demo", "plot_demo"]

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
    """Draw the four measures without and with replay to an image file; a ReplayPatchError if
    matplotlib is missing, or the file cannot be written."""
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
