"""Ask a MindSpeed, our stand-in or the checkout that MINDSPEED_PATH names, in a process of its own.

MindSpeed rewrites its process, so a script asks many questions and prints the answers, once for all
tests. Megatron is the one that comes first on PYTHONPATH.
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from helpers import interpreters

import replay_patch

REAL = os.environ.get("MINDSPEED_PATH")

_TESTS = Path(__file__).parents[1]
_SCRIPTS = _TESTS / "on_mindspeed"
_STANDIN = _TESTS / "standins"
_NPU = Path(replay_patch.__file__).parent / "matrix" / "standins"  # torch_npu and the like


def ask(mindspeed: str, script: str, *args: str, plugin: bool = False) -> Any:
    """Run a script of tests/on_mindspeed, once; returns what it prints last.

    Args:
        mindspeed: "real", or "stand-in" and the words by which it differs.
        args: of the script.
        plugin: whether the plugin is active from the import of torch on.
    """
    done = _run(mindspeed, script, *args, plugin=plugin)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@functools.cache
def _run(mindspeed: str, script: str, *args: str, plugin: bool) -> subprocess.CompletedProcess[str]:
    kind, _, words = mindspeed.partition(" ")
    env = interpreters.clean_environ()
    path = [REAL if kind == "real" else str(_STANDIN), str(_NPU), env.get("PYTHONPATH")]
    env |= {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "REPLAY_PATCH": str(int(plugin)),
        "MINDSPEED_STANDIN": words,
        "OMP_NUM_THREADS": "1",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "1",
    }
    command = [sys.executable, "-W", "ignore", str(_SCRIPTS / script), *args]
    return subprocess.run(command, env=env, text=True, capture_output=True)
