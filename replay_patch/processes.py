"""Python processes of ours: on a Megatron of the user's choice, whose import may do anything.

    with child("replay_patch.demo.experiment", "--seed", "0", env=environ([folder])) as job:
        while (message := job.next_message()) is not None:
            ...

Such a process says JSON objects to its parent, each on a line of the stdout that `parents_stdout`
gives it. All that Megatron and others print goes to stderr, of which the last lines are kept.
"""

import collections
import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

__all__ = ["Child", "child", "environ", "parents_stdout"]

_PACKAGE_PARENT = Path(__file__).absolute().parents[1]
_STOP_SECONDS = 5.0
_LINES_KEPT = 15


def environ(folders: Sequence[str | os.PathLike[str]] = ()) -> dict[str, str]:
    """The caller's variables, with the plugin on and `folders` found first.

    `REPLAY_PATCH_SKIP` and other settings of the caller stay. This package comes after the caller's
    own path: what hides it from a job must hide it here, too.
    """
    path = [os.path.abspath(folder) for folder in folders]
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path += [os.path.abspath(entry) for entry in inherited if entry]
    if _PACKAGE_PARENT.name not in ("site-packages", "dist-packages"):  # on every path already
        path.append(str(_PACKAGE_PARENT))
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(path),
        "REPLAY_PATCH": "1",
        # A row that repeats an expert routes natively, and is an error under STRICT.
        "REPLAY_PATCH_STRICT": "0",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "1",
        "CUDA_VISIBLE_DEVICES": "",  # Megatron asks whether there is a GPU, and would use it
        "OMP_NUM_THREADS": "1",  # a forked child of a process with OpenMP threads hangs
    }


@contextlib.contextmanager
def child(
    module: str, *arguments: str, env: Mapping[str, str], own_session: bool = False
) -> Iterator["Child"]:
    """Run `python -m module` with `arguments`; at the end of the block it has ended.

    Args:
        env: all of its variables, but for TMPDIR.
        own_session: keep Ctrl-C from it, which the caller then passes on.
    Raises:
        OSError: no room for its folder, or no memory for the process.
    """
    # An empty folder to start in: with -m it comes first on the path, and may hold a megatron.
    # It is also where all temporary files go, because a killed process leaves them.
    with tempfile.TemporaryDirectory(prefix="replay-patch-") as folder:
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", module, *arguments],
            env={**env, "TMPDIR": folder},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=own_session,
        )
        started = Child(process)
        try:
            yield started
        finally:
            started.end()


class Child:
    """A process that `child` has started."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self._messages: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._last_lines: collections.deque[str] = collections.deque(maxlen=_LINES_KEPT)
        # Threads, because a process blocks when nobody reads what it writes.
        self._stderr = threading.Thread(target=self._read_stderr, daemon=True)
        self._stderr.start()
        threading.Thread(target=self._read_stdout, daemon=True).start()

    def next_message(self, timeout: float | None = None) -> dict[str, Any] | None:
        """Wait for the next object that the process says; None: it has ended. Raises TimeoutError,
        and stops the process, if none comes in `timeout` seconds (None: as long as it takes)."""
        try:
            return self._messages.get(timeout=timeout)
        except queue.Empty:
            self.end()
            raise TimeoutError(f"no message for {timeout:g} s") from None

    @property
    def exit_code(self) -> int | None:
        """Negative: the signal that killed it. None: it runs."""
        return self._process.returncode

    def last_lines(self, count: int = _LINES_KEPT) -> list[str]:
        """The last lines that it printed, without blank ones; complete when it has ended."""
        return list(self._last_lines)[-count:]

    def terminate(self) -> None:
        """Ask it to end, and do not wait for that; from any thread."""
        self._process.terminate()

    def end(self) -> None:
        """Stop it, if it has not ended: kindly, so that it can stop what it has started."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_SECONDS)
        self._process.kill()
        self._process.wait()

    def _read_stdout(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                if not line.endswith("\n"):  # it was killed in the middle of one
                    break
                message = None
                with contextlib.suppress(ValueError):
                    message = json.loads(line)
                if isinstance(message, dict):
                    self._messages.put(message)
                else:  # printed before `parents_stdout`, by a sitecustomize, say
                    self._last_lines.append(line.rstrip())
        self._process.wait()
        self._stderr.join(_STOP_SECONDS)  # something that it has left behind may hold it open
        self._messages.put(None)

    def _read_stderr(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            self._last_lines.extend(line.rstrip() for line in lines if line.strip())


def parents_stdout() -> TextIO:
    """This process's stdout, for messages to its parent; what others print goes to stderr."""
    stdout = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    os.register_at_fork(after_in_child=stdout.close)  # one that outlives us is not waited for
    return stdout
