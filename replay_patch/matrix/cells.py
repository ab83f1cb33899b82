"""What runs in a matrix environment: import Megatron once, then each check in a process of its own.

    python -m replay_patch.matrix.cells --checks record,replay [--mindspeed] [--timeout 60]

The first line on stdout says what was imported, every other one is a finished cell, each as JSON.
Megatron takes seconds to import (and minutes where its optional packages are many), so the process
of a cell is forked from this one, which has done nothing but the imports.
"""

import argparse
import contextlib
import faulthandler
import importlib
import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replay_patch.matrix.checks import CHECKS
from replay_patch.matrix.registry import Check, Skip
from replay_patch.processes import parents_stdout

__all__ = ["main"]

_LINES_SHOWN = 12
_FRAMES_SHOWN = 6  # of each process
_WHERE = signal.SIGUSR1  # makes a process write where it is
_WHERE_SECONDS = 0.2
_POLL_SECONDS = 0.01
# In what `ranks.launch` raises: the end of a rank's traceback, which says what went wrong there.
_RANK_FAILED = re.compile(r"^[\w.]*(?:Error|NotActive)\b.*", re.M)


def main(argv: list[str] | None = None) -> int:
    """Run the checks asked for; returns 1 if Megatron could not be imported."""
    parser = argparse.ArgumentParser(prog="python -m replay_patch.matrix.cells")
    parser.add_argument("--checks", required=True)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=60.0, help="of a check, in seconds")
    parser.add_argument("--mindspeed", action="store_true")
    args = parser.parse_args(argv)
    out = parents_stdout()  # Megatron, MindSpeed and the checks may print
    try:
        imported = _import(args.mindspeed)
    except BaseException as error:  # noqa: BLE001 - whatever an import does is the user's answer
        print(json.dumps({"problem": _import_problem(error)}), file=out)
        return 1
    print(json.dumps(imported), file=out)
    stopped = threading.Event()  # not an exception: one that hits os.fork() is lost
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    checks = [CHECKS[name] for name in args.checks.split(",")]
    with tempfile.TemporaryDirectory(prefix="replay-patch-cells-") as folder:
        for cell in _run_all(checks, args.jobs, args.timeout, Path(folder), stopped):
            print(json.dumps(cell), file=out)
    return 0


# --- the imports ------------------------------------------------------------------------------


def _import(mindspeed: bool) -> dict[str, Any]:
    """Import as a job with the plugin on does; returns the versions and where they are from."""
    from replay_patch.matrix import ascend_bed, cpu

    cpu.install()
    import replay_patch
    from replay_patch.patching.registry import megatron_modules

    replay_patch.activate()
    version = None
    if mindspeed:
        # Before Megatron, whose modules bind what it replaces.
        version = str(getattr(ascend_bed.adapt(), "__version__", "unknown"))
    import megatron.core
    from megatron.core.package_info import __version__

    for module in megatron_modules():
        importlib.import_module(module)
    importlib.import_module("megatron.core.models.gpt")
    cpu.patch_megatron()
    folder = Path(str(megatron.core.__file__)).parents[2]
    return {"megatron": str(__version__), "mindspeed": version, "folder": str(folder)}


def _import_problem(error: BaseException) -> str:
    missing = getattr(error, "name", None)
    if missing in ("megatron", "megatron.core"):
        return (
            "there is no Megatron here: megatron.core is not installed and not on the path. "
            "`--megatron latest` downloads one"
        )
    advice = ""
    if isinstance(error, ModuleNotFoundError) and missing:
        ours = missing.startswith("megatron.")
        advice = "(Megatron-core 0.12.0 and later have it)" if ours else f"(install {missing})"
    return f"importing Megatron failed: {_described(error)}\n{advice}".rstrip()


# --- the cells --------------------------------------------------------------------------------


@dataclass
class _Running:
    check: Check
    process: int
    started: float
    folder: Path
    """For all that it writes: its log, its result, where it hangs."""


def _run_all(
    checks: list[Check], jobs: int, timeout: float, folder: Path, stopped: threading.Event
) -> Iterator[dict[str, Any]]:
    """Yield each cell when it is finished; at most `jobs` processes at once, ranks included."""
    waiting, running = list(checks), list[_Running]()
    try:
        while (waiting or running) and not stopped.is_set():
            busy = sum(cell.check.ranks for cell in running)
            if waiting and (not running or busy + waiting[0].ranks <= jobs):
                running.append(_start(waiting.pop(0), folder))
                continue
            for cell in running:
                late = time.monotonic() - cell.started > timeout
                ended = _ended(cell)
                if ended is None and not late:
                    continue
                if ended is None:
                    _ask_where(cell)
                running.remove(cell)
                _kill(cell)
                yield _outcome(cell, ended, timeout)
                break
            else:
                time.sleep(_POLL_SECONDS)
    finally:
        for cell in running:
            _kill(cell)


def _start(check: Check, folder: Path) -> _Running:
    folder = folder / check.name
    folder.mkdir()
    started = time.monotonic()
    process = os.fork()
    if process == 0:
        code = 1
        try:
            os.setpgid(0, 0)  # so that its ranks can be killed with it
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            descriptor = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            tempfile.tempdir = str(folder)  # so that a killed one leaves nothing behind
            with (folder / "check.trace").open("w") as trace:
                faulthandler.register(_WHERE, trace)
                (folder / "result").write_text(json.dumps(_try(check)))
            code = 0
        finally:
            os._exit(code)
    with contextlib.suppress(OSError):  # it has done so, or has ended
        os.setpgid(process, process)
    return _Running(check, process, started, folder)


def _try(check: Check) -> tuple[str, str]:
    """(status, detail) of a check, in its own process."""
    try:
        check.run()
    except Skip as reason:
        return "skip", str(reason)
    except BaseException as error:  # noqa: BLE001 - it is the cell's result
        return "fail", _described(error)
    return "pass", ""


def _ended(cell: _Running) -> int | None:
    """The exit code of a process that has ended (negative: the signal), else None."""
    process, status = os.waitpid(cell.process, os.WNOHANG)
    return None if process == 0 else os.waitstatus_to_exitcode(status)


def _ask_where(cell: _Running) -> None:
    """Let each process of a cell write where it is, into a file of its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(cell.process, _WHERE)
        time.sleep(_WHERE_SECONDS)


def _kill(cell: _Running) -> None:
    """Kill what is left of a cell: itself, and ranks that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(cell.process, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(cell.process, 0)


def _outcome(cell: _Running, ended: int | None, timeout: float) -> dict[str, Any]:
    result, log = cell.folder / "result", cell.folder / "log"
    if ended == 0 and result.exists():
        status, detail = json.loads(result.read_text())
    elif ended is None:
        where = _where(cell.folder) or _tail(log)
        status = "error"
        detail = f"still running after {timeout:g} s, and killed. It was at:\n{where}"
    else:
        name = signal.Signals(-ended).name if ended < 0 else f"exit code {ended}"
        status, detail = "error", f"its process died ({name}):\n{_tail(log)}"
    seconds = round(time.monotonic() - cell.started, 2)
    return {
        "check": cell.check.name,
        "status": status,
        "seconds": seconds,
        "detail": detail.strip().encode("utf-8", "replace").decode(),  # a surrogate is no text
    }


# --- words ------------------------------------------------------------------------------------


def _described(error: BaseException) -> str:
    """Its text, and where it was raised: the last place in a check, and the very last one."""
    if on_ranks := dict.fromkeys(_RANK_FAILED.findall(str(error))):
        causes = [text for text in on_ranks if "gloo" not in text]  # the others lost their peer
        return _shortened("\n".join(causes or on_ranks))
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if f"{os.sep}checks{os.sep}" in frame.filename]
    places = [
        f"at {Path(frame.filename).name}:{frame.lineno} in {frame.name}: {frame.line}"
        for frame in (*ours[-1:], *frames[-1:])
    ]
    said = _shortened(f"{type(error).__name__}: {error}")
    return "\n".join([said, *(place[:500] for place in dict.fromkeys(places))])


def _shortened(text: str) -> str:
    lines = [line[:500] for line in text.strip().splitlines() if line.strip()]
    return "\n".join(lines[:_LINES_SHOWN])


def _where(folder: Path) -> str:
    """The innermost frames of the check and of its ranks."""
    out = []
    for trace in sorted(folder.rglob("*.trace")):
        text = trace.read_text(errors="replace").splitlines()
        frames = [line.strip() for line in text if line.startswith("  File ")][:_FRAMES_SHOWN]
        out += [f"{trace.stem}:", *(f"  {frame}" for frame in frames)] if frames else []
    return "\n".join(out)


def _tail(path: Path) -> str:
    text = path.read_text(errors="replace") if path.exists() else ""
    return "\n".join(text.strip().splitlines()[-_LINES_SHOWN:])


if __name__ == "__main__":
    sys.exit(main())
