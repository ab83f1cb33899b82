"""Releases that have to be fetched: offline, interrupted, and where there is no room."""

import shutil
import socket
import zipfile
from pathlib import Path

import pytest
from helpers import matrix_runs

from replay_patch.matrix.environments import TESTED_RELEASES

pytestmark = pytest.mark.exhaustive

RELEASE = TESTED_RELEASES[0]
MEGABYTE = 1 << 20


def test_without_a_network_what_is_cached_is_run_and_the_rest_says_why(tmp_path: Path) -> None:
    kept = matrix_runs.release(RELEASE)
    shutil.copytree(kept, tmp_path / kept.name, copy_function=shutil.copyfile)

    done = matrix_runs.run(
        *("--megatron", f"{RELEASE},0.14.0", "--only", "layer-map"),
        cache=tmp_path,
        **matrix_runs.OFFLINE,
    )

    assert done.code == 1
    assert done.statuses(RELEASE) == {"layer-map": "pass"}
    assert done.statuses("0.14.0") == {"layer-map": "error"}
    detail = done.of("0.14.0")["layer-map"]["detail"]
    assert "0.14.0 is not in the cache and cannot be downloaded: pip reached no package" in detail
    assert [path.name for path in tmp_path.iterdir()] == [kept.name]


def test_ctrl_c_while_a_release_is_downloaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and says nothing
        silent.settimeout(60)
        index = f"http://127.0.0.1:{silent.getsockname()[1]}/simple"

        def interrupt(process: object) -> None:
            connection, _ = silent.accept()
            connections.append(connection)
            matrix_runs.interrupt_after("")(process)

        connections: list[socket.socket] = []
        done = matrix_runs.during(
            interrupt,
            *("--megatron", "0.14.0"),
            cache=tmp_path,
            leaves="pip-*",  # of a pip that was killed
            **(matrix_runs.OFFLINE | {"PIP_INDEX_URL": index}),
        )
        connections[0].close()

    assert done.code == 130
    assert "replay-patch: interrupted" in done.err
    assert list(tmp_path.iterdir()) == []


def test_without_room_nothing_half_made_is_kept(tmp_path: Path) -> None:
    """A limit on the size of files stands for the full disk: writing fails in the middle, too."""
    resource = pytest.importorskip("resource")
    cache, wheels = tmp_path / "cache", tmp_path / "wheels"
    wheels.mkdir()
    write_wheel(wheels / "megatron_core-0.14.0-py3-none-any.whl")
    options = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)}
    asked = ("--megatron", "0.14.0", "--only", "layer-map")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MEGABYTE, before[1]))
    try:
        done = matrix_runs.run(*asked, cache=cache, **options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    assert done.code == 1
    assert "File too large" in done.of("0.14.0")["layer-map"]["detail"]
    assert list(cache.iterdir()) == []

    again = matrix_runs.run(*asked, cache=cache, **options)  # now it is there, and no real Megatron
    assert "importing Megatron failed" in again.of("0.14.0")["layer-map"]["detail"]
    assert [path.name for path in cache.iterdir()] == ["megatron-core-0.14.0"]


def write_wheel(path: Path) -> None:
    """With one file that is larger than a megabyte."""
    info = "megatron_core-0.14.0.dist-info"
    wheel = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files = {
        "megatron/core/__init__.py": "",
        "megatron/core/large.bin": "0" * 3 * MEGABYTE,
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: megatron-core\nVersion: 0.14.0\n",
        f"{info}/WHEEL": wheel,
    }
    record = "".join(f"{name},,\n" for name in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as out:
        for name, text in (files | {f"{info}/RECORD": record}).items():
            out.writestr(name, text)
