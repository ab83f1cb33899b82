"""Run code in a fresh interpreter: for all that must happen in a certain order in a process."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

BED = "from replay_patch.matrix import cpu; cpu.install()\n"


def run(code: str, *, bed: bool = False, path: Path | None = None, **env: str) -> Any:
    """Run `code`, which prints one JSON value last, and return that.

    Args:
        bed: install the CPU bed first (it imports torch).
        path: a folder to put first on PYTHONPATH.
        env: variables to set; without REPLAY_PATCH the plugin is off.
    """
    done = python("-c", (BED if bed else "") + textwrap.dedent(code), path=path, **env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def python(*args: str, path: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """Run this Python with none of our variables in the environment but `env`."""
    clean = clean_environ()
    if path is not None:
        paths = [str(path), *filter(None, [clean.get("PYTHONPATH")])]
        clean["PYTHONPATH"] = os.pathsep.join(paths)
    return subprocess.run([sys.executable, *args], env=clean | env, text=True, capture_output=True)


def clean_environ() -> dict[str, str]:
    """The variables of this process without ours and torch's."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("REPLAY_PATCH", "TORCH_"))}
