"""Other implementations of routing replay, from PyPI, without what they depend on.

Only single modules are imported: the packages above them are empty stand-ins that know their
folder, so that no `__init__` runs.
"""

import contextlib
import functools
import importlib
import importlib.util
import logging
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

from replay_patch.matrix.environments import cache_dir

VERSIONS = {"verl": "0.9.1", "skyrl": "0.3.0"}
"""What is imported; a script of its own may choose another before it imports anything."""


@functools.cache
def folder(name: str, version: str | None = None) -> Path:
    """Where a package is, alone; of the version in `VERSIONS` unless another is asked for.

    Raises:
        RuntimeError: it cannot be downloaded.
    """
    version = version or VERSIONS[name]
    return download(f"{name}-{version}", f"{name}=={version}")


def download(target: str, *what: str) -> Path:
    """`pip install --no-deps` into a folder of the cache, once.

    Raises:
        RuntimeError: it cannot be downloaded.
    """
    found = cache_dir() / target
    if not found.is_dir():
        found.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=found.parent) as unfinished:
            pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile"]
            command = [*pip, "--target", unfinished, *what]
            done = subprocess.run(command, text=True, capture_output=True)
            if done.returncode:
                raise RuntimeError(done.stderr)
            with contextlib.suppress(OSError):  # another process was faster
                Path(unfinished).rename(found)
                Path(unfinished).mkdir()  # for the context to remove
    return found


def verl(module: str) -> Any:
    """A module of verl, as "models.mcore.util"."""
    _provide("verl.utils.device", get_device_name=lambda: "cpu", is_npu_available=False)
    _provide("verl.utils.model", CausalLMOutputForPPO=object)
    _empty_packages("verl.models.mcore")
    found = _module("verl", module)
    logger = getattr(found, "logger", None)
    if isinstance(logger, logging.Logger):  # a method that transformers adds
        logger.warning_once = lambda *args: None  # type: ignore[attr-defined]
    return found


def skyrl(module: str) -> Any:
    """A module of SkyRL, as "backends.skyrl_train.utils.replay_utils"."""
    if "loguru" not in sys.modules and importlib.util.find_spec("loguru") is None:
        _provide("loguru", logger=logging.getLogger("skyrl"))
    return _module("skyrl", module)


def _module(name: str, module: str) -> Any:
    path, _, _ = f"{name}.{module}".rpartition(".")
    _empty_packages(path)
    return importlib.import_module(f"{name}.{module}")


def _empty_packages(path: str) -> None:
    """This package and those above it."""
    parts = path.split(".")
    for depth in range(1, len(parts) + 1):
        package = ".".join(parts[:depth])
        if package not in sys.modules:
            made = types.ModuleType(package)
            made.__path__ = [str(folder(parts[0]).joinpath(*parts[:depth]))]
            sys.modules[package] = made


def _provide(name: str, **content: Any) -> None:
    """A stand-in for a module that would need much more."""
    if name not in sys.modules:
        made = types.ModuleType(name)
        vars(made).update(content)
        sys.modules[name] = made
