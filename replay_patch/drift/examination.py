"""The fingerprints of the Megatron here, taken in a fresh interpreter with the plugin off.
`python -m replay_patch.drift.examination` prints them as JSON; `examine` runs that and compares
them with the tested releases."""

import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from replay_patch.drift.comparison import NEEDED, compare, patches_compared, watched
from replay_patch.drift.fingerprints import ABSENT, UNSEEN, of_need, of_target
from replay_patch.errors import ReplayPatchError
from replay_patch.megatron import no_triton
from replay_patch.processes import child, parents_stdout
from replay_patch.refusals import installed_megatron

__all__ = ["examine", "installed_fingerprints", "say_fingerprints"]

_MODULE = "replay_patch.drift.examination"


def examine(
    python_path: Sequence[str | os.PathLike[str]] | None = None,
    *,
    module: str = _MODULE,
    timeout: float = 120.0,
) -> dict[str, Any]:
    """Compare the Megatron that a fresh interpreter finds, with the plugin off. Never raises.

    Args:
        python_path: folders to look in before those of this process.
        module: what the interpreter runs; it calls `say_fingerprints`.
        timeout: in seconds; importing Megatron takes about three.

    Returns:
        `megatron` (how it calls itself, or None), `drift` (as `compare` gives it), and `problem`:
        what could not be looked at and why, or None.
    """
    try:
        seen = installed_fingerprints(python_path, module=module, timeout=timeout)
    except (ReplayPatchError, OSError) as error:
        return {"megatron": None, "drift": [], "problem": str(error)}
    targets = seen["targets"]
    reasons = dict.fromkeys(f["reason"] for f in targets.values() if f["kind"] == UNSEEN)
    problem = f"not all of it can be imported: {'; '.join(reasons)}" if reasons else None
    return {"megatron": seen["megatron"], "drift": compare(targets), "problem": problem}


def installed_fingerprints(
    python_path: Sequence[str | os.PathLike[str]] | None = None,
    *,
    module: str = _MODULE,
    timeout: float = 120.0,
) -> dict[str, Any]:
    """What `say_fingerprints` says in a fresh interpreter: `megatron`, how it calls itself, and
    `targets`, the fingerprint of everything `watched`. The arguments are those of `examine`. A
    ReplayPatchError for no Megatron, a crash, or out of time; an OSError if the interpreter cannot
    be started."""
    paths = [os.path.abspath(path) for path in (*(python_path or ()), *sys.path)]
    environ = os.environ | {"REPLAY_PATCH": "0", "PYTHONPATH": os.pathsep.join(paths)}
    with child(module, env=environ) as interpreter:
        try:
            seen = interpreter.next_message(timeout)
        except TimeoutError:
            raise ReplayPatchError(
                f"importing Megatron was not finished after {timeout:g} s"
            ) from None
    if seen is None:
        last = (interpreter.last_lines(1) or ["no message"])[0]
        raise ReplayPatchError(
            f"importing Megatron ended Python (exit code {interpreter.exit_code}): {last}"
        )
    if seen["megatron"] is None:
        raise ReplayPatchError("there is no megatron.core on the path")
    return seen


def say_fingerprints(before_megatron: Callable[[], None]) -> None:
    """Import Megatron and say the fingerprints to the parent process. `before_megatron` is called
    first; it makes Megatron importable."""
    os.environ["REPLAY_PATCH"] = "0"  # before torch, which loads the plugin
    stdout = parents_stdout()
    before_megatron()
    targets = {target: of_target(target) for target in watched() if not target.startswith(NEEDED)}
    is_there = any(fingerprint["kind"] != ABSENT for fingerprint in targets.values())
    targets |= {f"{NEEDED}{patch.name}": of_need(patch) for patch in patches_compared()}
    megatron = installed_megatron() if is_there else None
    with stdout:
        print(json.dumps({"megatron": megatron, "targets": targets}), file=stdout)


def _without_compilers() -> None:
    """This process only reads code: triton need not be there, nor torch's compiler imported."""
    import torch

    no_triton.provide()
    vars(torch)["compile"] = lambda model=None, **_: model or (lambda function: function)


if __name__ == "__main__":
    say_fingerprints(_without_compilers)
