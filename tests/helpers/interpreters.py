"""Run code in a fresh interpreter: for all that must happen in a certain order in a process.

The code is a function of a module in tests/programs, which imports nothing but Python's own at its
top: the module is imported here too, and what the function imports first may be what the test is
about. It takes and returns JSON values. Up to three lines may be a string.
"""

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
BED = "from replay_patch.matrix import cpu; cpu.install()\n"


def run(
    program: Callable[..., Any] | str,
    *args: Any,
    bed: bool = False,
    path: Path | None = None,
    **env: str,
) -> Any:
    """Call a function in a fresh interpreter, and return what it returns.

    Args:
        program: a function of a module in tests/programs, or code that prints one JSON value last.
        args: of the function.
        bed: install the CPU bed first (it imports torch).
        path: a folder to put first on PYTHONPATH.
        env: variables to set; without REPLAY_PATCH the plugin is off.
    """
    if isinstance(program, str):
        done = python("-c", (BED if bed else "") + textwrap.dedent(program), path=path, **env)
    else:
        done = python(*command(program, *args, bed=bed), path=path, **env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def run_module(name: str, *args: str, path: Path | None = None, **env: str) -> Any:
    """`python -m NAME ARGS`, which prints one JSON value last; for programs that are about the
    order of their first imports, and cannot be imported here."""
    done = python("-m", name, *args, path=path, **env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def command(function: Callable[..., Any], *args: Any, bed: bool = False) -> list[str]:
    """Arguments for Python that call a function and print what it returns as JSON."""
    options = ["--bed"] if bed else []
    name = f"{function.__module__}:{function.__name__}"
    return ["-m", "helpers.call", *options, name, json.dumps(args)]


def python(*args: str, path: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """Run this Python with none of our variables in the environment but `env`; tests/ is last on
    its path."""
    clean = clean_environ() | env
    paths = [path, clean.get("PYTHONPATH"), TESTS]
    clean["PYTHONPATH"] = os.pathsep.join(str(each) for each in paths if each)
    return subprocess.run([sys.executable, *args], env=clean, text=True, capture_output=True)


def clean_environ() -> dict[str, str]:
    """The variables of this process without ours and torch's."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("REPLAY_PATCH", "TORCH_"))}
