"""`replay-patch demo`: what routing replay changes, on a real Megatron-core, in a minute on a CPU.
`run_demo` fetches the release and runs `replay_patch.demo.experiment` on it in a process of its
own, so that neither torch nor Megatron of the calling process is touched."""

import functools
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from replay_patch.errors import ReplayPatchError
from replay_patch.matrix import environments
from replay_patch.processes import child, environ

__all__ = ["run_demo"]


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
        `without_replay` and `with_replay` (each the keys of `report.MEASURES`, shares as fractions
        of 1), `seconds`, and more about the job (`loss`, `sizes`, `torch`).

    Raises:
        ReplayPatchError: the release cannot be had, or the job failed (its last lines are shown).
    """
    started = time.monotonic()
    say = progress or functools.partial(print, file=sys.stderr, flush=True)
    if megatron_path is None:
        say(f"Megatron-core {megatron} (downloaded at its first use)")
        folder = environments.environment(megatron, cache)
    else:
        folder = environments.checkout(megatron_path)
    arguments = ("--seed", str(seed), "--megatron", str(folder))
    result: dict[str, Any] | None = None
    with child("replay_patch.demo.experiment", *arguments, env=environ([folder])) as job:
        while (message := job.next_message()) is not None:
            if "progress" in message:
                say(message["progress"])
            else:
                result = message["result"]
    if job.exit_code != 0 or result is None:
        shown = "\n".join(f"  {line}" for line in job.last_lines())
        raise ReplayPatchError(
            f"demo: the job on {folder} ended with exit code {job.exit_code}; it said:\n{shown}"
        )
    result["seconds"] = round(time.monotonic() - started, 1)
    return result
