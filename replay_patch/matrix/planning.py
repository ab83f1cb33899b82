"""Which Megatrons a matrix runs on: releases, folders, the installed one, with MindSpeed or not."""

import contextlib
import importlib.util
import os
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.version import Version

from replay_patch.errors import ReplayPatchError
from replay_patch.matrix.environments import NEWEST, TESTED_RELEASES, checkout, environment

__all__ = ["Environment", "Progress", "is_installed", "plan"]

Progress = Callable[[str], None]
"""Called with one line of progress."""


@dataclass(frozen=True)
class Environment:
    """One Megatron to check; without a path, the one installed here."""

    megatron: str
    """How it was asked for: a release, a folder, or "installed"; later the version it reports."""
    path: Path | None = None
    mindspeed: str | None = None
    """The name of its folder; or "installed", later its version. None: without MindSpeed."""
    mindspeed_path: Path | None = None
    problem: str = ""
    """Why it cannot be had; its cells are errors."""
    is_tested: bool = False
    """A download of a tested release, which is what `known_targets.json` was made from."""

    def __str__(self) -> str:
        return self.megatron + (f" with MindSpeed {self.mindspeed}" if self.mindspeed else "")


def plan(
    releases: Sequence[str] = (),
    megatron_paths: Sequence[str] = (),
    mindspeed_paths: Sequence[str] = (),
    cache: str | None = None,
    say: Progress = print,
) -> list[Environment]:
    """The environments asked for, or else the installed Megatron, alone and with any MindSpeed.

    Args:
        releases: "all", "latest" or versions; downloaded if not in the cache.
        megatron_paths: folders that hold a `megatron` package.
        mindspeed_paths: MindSpeed checkouts, as `DIR`, `DIR=RELEASE` or `DIR=MEGATRON_DIR`.
        cache: the folder of `environments.cache_dir`.
        say: called with a line for each release, before a download.
    """
    words = {"all": TESTED_RELEASES, "latest": (NEWEST,)}
    wanted = [release for name in releases for release in words.get(name, (name,))]
    out = [_release(release, cache, say) for release in dict.fromkeys(wanted)]
    out += [_folder(path) for path in dict.fromkeys(megatron_paths)]
    alone = out[0] if len(out) == 1 else None
    if not (out or mindspeed_paths):
        out = [Environment("installed")]
        if is_installed("mindspeed"):
            out.append(Environment("installed", mindspeed="installed"))
    for argument in dict.fromkeys(mindspeed_paths):
        out.append(_with_mindspeed(argument, alone, cache, say))
    return out


def _release(release: str, cache: str | None, say: Progress) -> Environment:
    say(f"Megatron-core {release}")
    try:
        folder = environment(release, cache)
        return Environment(release, folder, is_tested=release in TESTED_RELEASES)
    except ReplayPatchError as error:
        return Environment(release, problem=str(error))


def _folder(path: str) -> Environment:
    try:
        return Environment(path, checkout(path))
    except ReplayPatchError as error:
        return Environment(path, problem=str(error))


def _with_mindspeed(
    argument: str, alone: Environment | None, cache: str | None, say: Progress
) -> Environment:
    folder, _, pair = argument.partition("=")
    path = Path(folder).expanduser().absolute()
    name = path.name
    if not (path / "mindspeed").is_dir():
        problem = f"{path} holds no mindspeed; expected the folder of a MindSpeed checkout"
        return Environment("?", None, name, path, problem)
    if pair:
        megatron = (
            _folder(pair) if os.sep in pair or Path(pair).is_dir() else _release(pair, cache, say)
        )
    elif release := _release_of(path):
        megatron = _release(release, cache, say)
    elif alone is not None:
        megatron = alone
    else:
        problem = (
            f"which Megatron {path} is for can be told neither from its branch nor from its name "
            "(expected ..._core_r0.N.P): say --mindspeed-path DIR=RELEASE"
        )
        return Environment("?", None, name, path, problem)
    return replace(megatron, mindspeed=name, mindspeed_path=path)


def _release_of(checkout: Path) -> str | None:
    """The release that MindSpeed's branch name, or the folder's name, is for."""
    git, branch = ["git", "-C", str(checkout), "rev-parse", "--abbrev-ref", "HEAD"], ""
    with contextlib.suppress(OSError):  # no git here
        branch = subprocess.run(git, capture_output=True, text=True, check=False).stdout
    for name in (branch, checkout.name):
        if match := re.search(r"core_r(\d+\.\d+\.\d+)", name):
            minor = Version(match[1]).release[:2]
            tested = [r for r in TESTED_RELEASES if Version(r).release[:2] == minor]
            # Where it is not tested itself: the newest tested patch of the same minor.
            return match[1] if match[1] in tested or not tested else tested[-1]
    return None


def is_installed(name: str) -> bool:
    """Whether a package can be found, without importing it."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
