"""The release cache, with a pip that is played: no network, no real download."""

import errno
import importlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import platformdirs
import pytest

from replay_patch.errors import ReplayPatchError
from replay_patch.matrix import environments
from replay_patch.matrix.environments import NEWEST, TESTED_RELEASES, cache_dir, environment

NO_MATCH = "ERROR: No matching distribution found for megatron-core=={}"


class Pip:
    """Stands for `subprocess.run([python, -m, pip, install, ...])`; notes each command."""

    def __init__(self, *behaviours):
        self.behaviours = list(behaviours)
        self.commands = []

    def __call__(self, command, **kwargs):
        self.commands.append(command)
        behaviour = self.behaviours.pop(0) if self.behaviours else installs
        target = Path(command[command.index("--target") + 1])
        error = behaviour(target)
        return subprocess.CompletedProcess(command, 1 if error else 0, "", error or "")


def installs(target):
    package = target / "megatron" / "core"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")


def says(error):
    return lambda target: error


def is_killed(target):
    installs(target)
    raise KeyboardInterrupt


@pytest.fixture
def use_pip(monkeypatch):
    def use(*behaviours):
        pip = Pip(*behaviours)
        monkeypatch.setattr(environments.subprocess, "run", pip)
        return pip

    return use


def leftovers(cache):
    return [entry.name for entry in cache.iterdir() if entry.name.startswith(".download")]


def test_a_release_is_downloaded_once_and_then_used_offline(use_pip, tmp_path):
    pip = use_pip(installs)

    first = environment("0.14.0", tmp_path)
    pip.behaviours = [says("ERROR: offline")]
    second = environment("0.14.0", tmp_path)

    assert first == second == tmp_path / "megatron-core-0.14.0"
    assert (first / "megatron" / "core" / "__init__.py").is_file()
    assert len(pip.commands) == 1
    assert pip.commands[0][:4] == [sys.executable, "-m", "pip", "install"]
    assert pip.commands[0][-1] == "megatron-core==0.14.0"
    assert leftovers(tmp_path) == []


def test_latest_is_the_newest_tested_release(use_pip, tmp_path):
    use_pip(installs)

    assert environment("latest", tmp_path).name == f"megatron-core-{NEWEST}"
    assert TESTED_RELEASES[-1] == NEWEST


@pytest.mark.parametrize(
    "machine, tag",
    [
        ("x86_64", "manylinux_2_28_x86_64"),
        ("aarch64", "manylinux_2_28_aarch64"),
        ("arm64", "manylinux_2_28_aarch64"),
    ],
)
def test_a_release_for_newer_pythons_is_taken_as_a_wheel(
    use_pip, tmp_path, monkeypatch, machine, tag
):
    monkeypatch.setattr(environments.platform, "machine", lambda: machine)
    pip = use_pip(says(NO_MATCH.format("0.19.2")), installs)

    environment("0.19.2", tmp_path)

    assert "--ignore-requires-python" not in pip.commands[0]
    assert "--ignore-requires-python" in pip.commands[1]
    assert tag in pip.commands[1]


def test_an_interrupted_download_is_not_believed_in(use_pip, tmp_path):
    pip = use_pip(is_killed)
    with pytest.raises(KeyboardInterrupt):
        environment("0.14.0", tmp_path)
    assert list(tmp_path.iterdir()) == []

    environment("0.14.0", tmp_path)

    assert len(pip.commands) == 2


def test_a_folder_without_the_marker_is_downloaded_again(use_pip, tmp_path):
    pip = use_pip(installs)
    final = tmp_path / "megatron-core-0.14.0"
    installs(final)
    (final / "half").write_text("")

    assert environment("0.14.0", tmp_path) == final

    assert len(pip.commands) == 1
    assert not (final / "half").exists()


def test_what_a_killed_process_left_is_removed_a_day_later(use_pip, tmp_path):
    use_pip(installs)
    old, young = tmp_path / ".download-0.12.0-old", tmp_path / ".download-0.12.0-young"
    for folder in (old, young):
        folder.mkdir()
    day_ago = time.time() - 25 * 3600
    os.utime(old, (day_ago, day_ago))

    environment("0.14.0", tmp_path)

    assert leftovers(tmp_path) == [young.name]


def test_processes_that_race_for_one_release_all_succeed(use_pip, tmp_path):
    together = threading.Barrier(3)

    def installs_at_the_same_time(target):
        installs(target)
        together.wait(timeout=10)

    pip = use_pip(*[installs_at_the_same_time] * 3)
    results = []
    racers = [
        threading.Thread(target=lambda: results.append(environment("0.14.0", tmp_path)))
        for _ in range(3)
    ]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()

    assert results == [tmp_path / "megatron-core-0.14.0"] * 3
    assert len(pip.commands) == 3
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(
    "release, reason",
    [("0.11.0", "0.12.0 and later"), ("newest", "no version"), ("../x", "no version")],
)
def test_an_unsupported_release_is_refused_before_any_download(use_pip, tmp_path, release, reason):
    pip = use_pip()

    with pytest.raises(ReplayPatchError, match=reason) as error:
        environment(release, tmp_path)

    assert NEWEST in str(error.value)
    assert pip.commands == []


def test_a_release_the_index_does_not_have_is_unknown(use_pip, tmp_path):
    pip = use_pip(*[says(NO_MATCH.format("9.9.9"))] * 2)

    with pytest.raises(ReplayPatchError, match="no such release"):
        environment("9.9.9", tmp_path)

    assert len(pip.commands) == 2
    assert list(tmp_path.iterdir()) == []


def test_without_a_network_the_error_says_what_to_do(use_pip, tmp_path):
    offline = (
        "WARNING: Retrying after connection broken by NewConnectionError\n"
        "ERROR: Could not find a version that satisfies megatron-core==0.14.0 "
        "(from versions: none)\n" + NO_MATCH.format("0.14.0")
    )
    pip = use_pip(says(offline))

    with pytest.raises(ReplayPatchError, match="not in the cache") as error:
        environment("0.14.0", tmp_path)

    assert "REPLAY_PATCH_CACHE" in str(error.value)
    assert len(pip.commands) == 1  # a second attempt would only wait for the same timeouts


def test_a_full_disk_is_named(use_pip, tmp_path):
    use_pip(says("ERROR: Could not install packages: [Errno 28] No space left on device"))

    with pytest.raises(ReplayPatchError, match=os.strerror(errno.ENOSPC)):
        environment("0.14.0", tmp_path)

    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_named(use_pip, tmp_path):
    use_pip()
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")

    with pytest.raises(ReplayPatchError, match="cannot be stored in"):
        environment("0.14.0", in_the_way)


def test_a_python_without_pip_is_named(use_pip, tmp_path, monkeypatch):
    pip = use_pip()
    monkeypatch.setattr(environments.importlib.util, "find_spec", lambda name: None)

    with pytest.raises(ReplayPatchError, match="ensurepip"):
        environment("0.14.0", tmp_path)

    assert pip.commands == []


def test_other_failures_show_what_pip_said_without_its_list_of_versions(use_pip, tmp_path):
    long_list = ", ".join(f"0.{i}.0" for i in range(100))
    use_pip(*[says(f"ERROR: no compiler (from versions: {long_list})")] * 2)

    with pytest.raises(ReplayPatchError, match=r"no compiler \(from versions: \.\.\.\)"):
        environment("0.14.0", tmp_path)


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Make this process one of another platform, for platformdirs, which asks when imported."""

    def become(name: str) -> None:
        monkeypatch.setattr(sys, "platform", name)
        importlib.reload(platformdirs)

    yield become
    monkeypatch.undo()
    importlib.reload(platformdirs)


def test_the_cache_folder_follows_argument_variable_and_platform(monkeypatch, tmp_path, platform):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("REPLAY_PATCH_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    platform("darwin")
    assert cache_dir() == tmp_path / "Library" / "Caches" / "replay-patch"
    platform("linux")
    assert cache_dir() == tmp_path / ".cache" / "replay-patch"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "replay-patch"
    platform("win32")  # whose own functions say where the folders lie
    folders = {"CSIDL_LOCAL_APPDATA": str(tmp_path / "local")}
    monkeypatch.setattr("platformdirs.windows.get_win_folder", folders.__getitem__)
    assert cache_dir() == tmp_path / "local" / "replay-patch"

    monkeypatch.setenv("REPLAY_PATCH_CACHE", "~/mine")
    assert cache_dir() == tmp_path / "mine"
    assert cache_dir(tmp_path / "given") == tmp_path / "given"
