"""Megatron-core releases on this machine: downloaded once, then used offline.

`environment("0.14.0")` is a folder for PYTHONPATH with the `megatron` package of that release.
Nothing is installed into the running Python."""

import contextlib
import errno
import importlib.util
import json
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import platformdirs
from packaging.version import InvalidVersion, Version

from replay_patch.errors import ReplayPatchError

__all__ = ["NEWEST", "TESTED_RELEASES", "cache_dir", "checkout", "environment"]

TESTED_RELEASES = (
    "0.12.0",
    "0.12.1",
    "0.12.3",
    "0.13.0",
    "0.13.1",
    "0.14.0",
    "0.15.0",
    "0.15.3",
    "0.16.0",
    "0.16.1",
    "0.17.1",
    "0.18.0",
    "0.18.2",
    "0.19.0",
    "0.19.2",
)
NEWEST = TESTED_RELEASES[-1]

_log = logging.getLogger(__name__)

_MARKER = ".replay-patch-complete"  # written last: a folder without it is not believed in
_STALE_SECONDS = 24 * 3600  # a temporary folder this old belongs to a download that was killed
_PIP_LINES_SHOWN = 6
_NO_NETWORK = re.compile(
    r"from versions: none|NewConnectionError|ConnectTimeout|ProxyError|SSLError"
    r"|Max retries exceeded|Network is unreachable"
    r"|[Nn]ame resolution|Name or service not known|nodename nor servname"
)
_DISK_FULL = re.compile(r"No space left on device|Errno 28|Disk quota exceeded")


def cache_dir(folder: str | os.PathLike[str] | None = None) -> Path:
    """Where releases are kept: in `folder`, else in REPLAY_PATCH_CACHE, else in `replay-patch` in
    the platform's cache."""
    chosen = folder or os.environ.get("REPLAY_PATCH_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    return platformdirs.user_cache_path("replay-patch", appauthor=False, opinion=False)


def environment(release: str, cache: str | os.PathLike[str] | None = None) -> Path:
    """The folder to put on PYTHONPATH for a Megatron-core version, or for "latest", our `NEWEST`.

    The first call downloads it with this Python's pip to `cache_dir(cache)`; later ones need no
    network. An interrupted download leaves nothing that is used; processes may race for a release.
    ReplayPatchError: no such release, older than 0.12, no network, no pip, or no room.
    """
    version = _version(release)
    root = cache_dir(cache)
    final = root / f"megatron-core-{version}"
    if _complete(final):
        return final
    _log.info("downloading megatron-core %s to %s", version, final)
    try:
        root.mkdir(parents=True, exist_ok=True)
        _remove_stale(root)
        temporary = Path(tempfile.mkdtemp(prefix=f".download-{version}-", dir=root))
    except OSError as error:
        raise _cannot_write(version, root, error) from error
    try:
        temporary.chmod(0o755)  # mkdtemp's 0o700 would keep a shared cache to one user
        _download(version, temporary)
        (temporary / _MARKER).write_text(json.dumps({"megatron-core": version}))
        _publish(temporary, final)
    except OSError as error:
        raise _cannot_write(version, root, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return final


def checkout(folder: str | os.PathLike[str]) -> Path:
    """The absolute path of a folder; ReplayPatchError unless it holds a `megatron` package."""
    path = Path(folder).expanduser().absolute()
    if not (path / "megatron" / "core").is_dir():
        raise ReplayPatchError(
            f"{path} holds no megatron/core; expected the folder of a Megatron-LM checkout or of "
            "an unpacked megatron-core"
        )
    return path


def _version(release: str) -> str:
    """The release as a normal version, which is safe in a path and on a command line."""
    if release == "latest":
        return NEWEST
    try:
        version = Version(release)
    except InvalidVersion:
        raise _unknown(release, "that is no version number") from None
    if version < Version(TESTED_RELEASES[0]):
        raise _unknown(release, f"replay-patch supports {TESTED_RELEASES[0]} and later")
    if str(version) not in TESTED_RELEASES:
        _log.warning(
            "megatron-core %s is not among the releases replay-patch is tested on", version
        )
    return str(version)


def _complete(folder: Path) -> bool:
    return (folder / _MARKER).is_file() and (folder / "megatron" / "core").is_dir()


def _publish(temporary: Path, final: Path) -> None:
    """Give the finished download its name, unless another process was faster."""
    for _ in range(2):
        try:
            os.replace(temporary, final)  # refused where a folder with files in it is
            return
        except OSError:
            if _complete(final):
                return
            if not final.is_dir():
                raise
            # Something incomplete has the name (files deleted by hand): out of the way with it.
            with contextlib.suppress(OSError):  # the other process of a race may do the same
                os.replace(final, tempfile.mkdtemp(prefix=".download-broken-", dir=final.parent))
    raise OSError(
        errno.EEXIST, "an incomplete folder is in the way and cannot be moved", str(final)
    )


def _remove_stale(root: Path) -> None:
    for folder in root.glob(".download-*"):
        with contextlib.suppress(OSError):
            broken = folder.name.startswith(".download-broken-")
            if broken or time.time() - folder.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)


def _download(version: str, target: Path) -> None:
    if importlib.util.find_spec("pip") is None:
        raise ReplayPatchError(
            f"megatron-core {version} cannot be downloaded: {sys.executable} has no pip. "
            "Run `python -m ensurepip` with it, or set REPLAY_PATCH_CACHE to a cache that has it."
        )
    output = ""
    for options in ([], _any_python_wheel()):
        _empty(target)
        result = _pip(version, target, options)
        if result.returncode == 0 and (target / "megatron" / "core" / "__init__.py").is_file():
            return
        output = result.stdout + result.stderr
        if _DISK_FULL.search(output):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target.parent))
        if _NO_NETWORK.search(output):
            break
    raise _not_downloaded(version, output)


def _any_python_wheel() -> list[str]:
    """pip options that take a wheel made for CPython 3.12 on Linux. From 0.17 on they ask for 3.12,
    but 3.10 can parse them; their only compiled file is for data sets and never imported here, so
    that a Linux wheel does on a Mac, too."""
    machine = "aarch64" if platform.machine().lower() in ("aarch64", "arm64") else "x86_64"
    return [
        *("--ignore-requires-python", "--only-binary=:all:", "--implementation", "cp"),
        *("--python-version", "3.12", "--platform", f"manylinux_2_28_{machine}"),
    ]


def _pip(version: str, target: Path, options: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "-q"]
    command += ["--no-input", "--retries", "2", "--no-deps", "--target", str(target)]
    command += [*options, f"megatron-core=={version}"]
    # A user's `user = true` cannot be combined with --target, and PYTHONPATH may hold another pip.
    environ = {**os.environ, "PIP_USER": "0"}
    environ.pop("PYTHONPATH", None)
    return subprocess.run(command, capture_output=True, text=True, env=environ, check=False)


def _empty(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _unknown(release: str, why: str) -> ReplayPatchError:
    known = ", ".join(TESTED_RELEASES)
    return ReplayPatchError(
        f'megatron-core {release!r}: {why}. Expected "latest" or one of {known}.'
    )


def _not_downloaded(version: str, output: str) -> ReplayPatchError:
    if _NO_NETWORK.search(output):
        return ReplayPatchError(
            f"megatron-core {version} is not in the cache and cannot be downloaded: pip reached no "
            "package index that has it. Connect once (see `pip config list` for the index in use), "
            f"or set REPLAY_PATCH_CACHE to a cache that has it. pip said:\n{_tail(output)}"
        )
    if "No matching distribution" in output:
        return _unknown(version, "the package index has no such release")
    return ReplayPatchError(
        f"megatron-core {version} could not be installed; pip said:\n{_tail(output)}\n"
        "(0.12 and 0.13 have no wheels: building them needs a C++ compiler.)"
    )


def _cannot_write(version: str, root: Path, error: OSError) -> ReplayPatchError:
    return ReplayPatchError(
        f"megatron-core {version} cannot be stored in {root}: {error.strerror or error}. "
        "Free some room (a release takes about 20 MB) or set REPLAY_PATCH_CACHE to another folder."
    )


def _tail(output: str) -> str:
    """pip's last lines, without its list of every version there is."""
    text = re.sub(r"\(from versions: [^)]{80,}\)", "(from versions: ...)", output.strip())
    return "\n".join("  " + line[:300] for line in text.splitlines()[-_PIP_LINES_SHOWN:])
