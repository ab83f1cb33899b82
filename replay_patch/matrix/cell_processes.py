"""Run each check in a forked process, for a limited time, and tell why it failed, hung or died."""

import contextlib
import faulthandler
import json
import os
import re
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replay_patch.matrix.registry import Check, Skip

__all__ = ["described", "run_all", "try_check"]

_WRITE_TRACE = signal.SIGUSR1  # makes a process write where it is
_TRACE_SECONDS = 0.2
_POLL_SECONDS = 0.01
_LINES_SHOWN = 12
_FRAMES_SHOWN = 6  # of each process
# The last line of a rank's traceback, within the text of the error that `ranks.launch` raises.
_RANK_FAILED = re.compile(r"^[\w.]*(?:Error|NotActive)\b.*", re.M)


@dataclass
class _Cell:
    """A running check."""

    check: Check
    process: int
    started: float
    folder: Path
    """Of what it writes: its log, its result, where it hangs."""


def run_all(
    checks: list[Check], jobs: int, timeout: float, folder: Path, stopped: threading.Event
) -> Iterator[dict[str, Any]]:
    """Yield each cell when it is finished; at most `jobs` processes at once, ranks included."""
    waiting, running = list(checks), list[_Cell]()
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
                    _ask_for_traces(cell)
                running.remove(cell)
                _kill(cell)
                yield _outcome(cell, ended, timeout)
                break
            else:
                time.sleep(_POLL_SECONDS)
    finally:
        for cell in running:
            _kill(cell)


def _start(check: Check, folder: Path) -> _Cell:
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
                faulthandler.register(_WRITE_TRACE, trace)
                (folder / "result").write_text(json.dumps(try_check(check)))
            code = 0
        finally:
            os._exit(code)
    with contextlib.suppress(OSError):  # it has done so, or has ended
        os.setpgid(process, process)
    return _Cell(check, process, started, folder)


def try_check(check: Check) -> tuple[str, str]:
    """(status, detail) of a check, in its own process."""
    try:
        check.run()
    except Skip as reason:
        return "skip", str(reason)
    except BaseException as error:  # noqa: BLE001 - it is the cell's result
        return "fail", described(error)
    return "pass", ""


def _ended(cell: _Cell) -> int | None:
    """The exit code of a process that has ended (negative: the signal), else None."""
    process, status = os.waitpid(cell.process, os.WNOHANG)
    return None if process == 0 else os.waitstatus_to_exitcode(status)


def _ask_for_traces(cell: _Cell) -> None:
    """Let each process of a cell write where it is, into a file of its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(cell.process, _WRITE_TRACE)
        time.sleep(_TRACE_SECONDS)


def _kill(cell: _Cell) -> None:
    """Kill what is left of a cell: itself, and ranks that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(cell.process, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(cell.process, 0)


def _outcome(cell: _Cell, ended: int | None, timeout: float) -> dict[str, Any]:
    result, log = cell.folder / "result", cell.folder / "log"
    if ended == 0 and result.exists():
        status, detail = json.loads(result.read_text())
    elif ended is None:
        frames = _innermost_frames(cell.folder) or _last_lines(log)
        status = "error"
        detail = f"still running after {timeout:g} s, and killed. It was at:\n{frames}"
    else:
        name = signal.Signals(-ended).name if ended < 0 else f"exit code {ended}"
        status, detail = "error", f"its process died ({name}):\n{_last_lines(log)}"
    seconds = round(time.monotonic() - cell.started, 2)
    return {
        "check": cell.check.name,
        "status": status,
        "seconds": seconds,
        "detail": detail.strip().encode("utf-8", "replace").decode(),  # a surrogate is no text
    }


def described(error: BaseException) -> str:
    """Its text, and where it was raised: the last place in a check, and the very last one."""
    if on_ranks := dict.fromkeys(_RANK_FAILED.findall(str(error))):
        causes = [text for text in on_ranks if "gloo" not in text]  # the others lost their peer
        return _shortened("\n".join(causes or on_ranks))
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if f"{os.sep}checks{os.sep}" in frame.filename]
    lines = [
        f"at {Path(frame.filename).name}:{frame.lineno} in {frame.name}: {frame.line}"
        for frame in (*ours[-1:], *frames[-1:])
    ]
    text = _shortened(f"{type(error).__name__}: {error}")
    return "\n".join([text, *(line[:500] for line in dict.fromkeys(lines))])


def _innermost_frames(folder: Path) -> str:
    """Where the check and its ranks are, from the `.trace` file that each of them has written."""
    out = []
    for trace in sorted(folder.rglob("*.trace")):
        text = trace.read_text(errors="replace").splitlines()
        frames = [line.strip() for line in text if line.startswith("  File ")][:_FRAMES_SHOWN]
        out += [f"{trace.stem}:", *(f"  {frame}" for frame in frames)] if frames else []
    return "\n".join(out)


def _last_lines(path: Path) -> str:
    """The end of a file; "" if there is none."""
    text = path.read_text(errors="replace") if path.exists() else ""
    return "\n".join(text.strip().splitlines()[-_LINES_SHOWN:])


def _shortened(text: str) -> str:
    lines = [line[:500] for line in text.strip().splitlines() if line.strip()]
    return "\n".join(lines[:_LINES_SHOWN])
