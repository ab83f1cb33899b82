"""Trainers from PyPI, with what they import and a Megatron release, in processes of their own.

Nothing of them is installed into the Python that runs the tests: they come by PYTHONPATH.
"""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from helpers import interpreters, peer_packages

from replay_patch.matrix.environments import cache_dir, environment

TESTS = Path(__file__).parents[1]
_REQUIREMENTS = TESTS / "trainers" / "requirements.txt"


def dependencies() -> Path:
    """The packages of `trainers/requirements.txt`; they are downloaded once into the cache."""
    content = _REQUIREMENTS.read_bytes()
    name = f"trainer-requirements-{hashlib.sha256(content).hexdigest()[:12]}"
    return peer_packages.download(name, "-r", str(_REQUIREMENTS))


def run(
    program: str,
    megatron: str,
    trainers: Mapping[str, str],
    *args: str,
    plugin: bool = True,
    transformer_engine: bool = False,
) -> Any:
    """Run a program, which prints one JSON value last, and return that; tests/ is on its path.

    Args:
        program: a module ("programs.trainers.mbridge"), or code of up to three lines.
        megatron: a release of Megatron-core.
        trainers: what to have on the path, package: version.
        args: of a module.
        plugin: with REPLAY_PATCH=1.
        transformer_engine: with the stand-in for it.
    """
    paths = [os.environ.get("PYTHONPATH"), environment(megatron), TESTS]
    paths += [peer_packages.folder(name, version) for name, version in trainers.items()]
    paths += [dependencies()]
    paths += [TESTS / "standins" / "te"] if transformer_engine else []
    env = {"PYTHONPATH": os.pathsep.join(str(path) for path in paths if path)}
    # Compiled once, whatever the environment says: half of the time of a process goes there.
    env |= {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(cache_dir() / "pycache")}
    env |= {"REPLAY_PATCH": "1"} if plugin else {}
    if program.replace(".", "_").isidentifier():
        return interpreters.run_module(program, *args, **env)
    return interpreters.run(program, **env)
