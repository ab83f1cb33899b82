"""What is built from the checkout: the wheel, and the wheel of the sdist, hold every patch file."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BACKEND = "from setuptools import build_meta as b; print(b.build_{}({!r}))"


def build(kind: str, source: Path, out: Path) -> Path:
    done = subprocess.run(
        [sys.executable, "-c", BACKEND.format(kind, str(out))],
        cwd=source,
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    return out / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tracked files: building leaves folders behind."""
    copy = tmp_path_factory.mktemp("source")
    archive = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        text=True,
        capture_output=True,
        check=True,
    )
    for name in archive.stdout.splitlines():
        if not (ROOT / name).exists():
            continue
        to = copy / name
        to.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            to.symlink_to((ROOT / name).readlink())
        else:
            to.write_bytes((ROOT / name).read_bytes())
    return copy


def expected() -> set[str]:
    files = {f"replay_patch/{p.relative_to(ROOT)}" for p in (ROOT / "patches").rglob("*.py")}
    for path in (ROOT / "replay_patch").rglob("*"):
        if path.suffix in (".py", ".json") or path.name == "py.typed":
            files.add(str(path.relative_to(ROOT)))
    return files


def contents(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as z:
        return {n for n in z.namelist() if ".dist-info/" not in n}


def test_the_wheel_holds_every_file(source: Path, tmp_path: Path) -> None:
    assert contents(build("wheel", source, tmp_path)) == expected()


def test_the_wheel_of_the_sdist_holds_every_file(source: Path, tmp_path: Path) -> None:
    sdist = build("sdist", source, tmp_path)
    with tarfile.open(sdist) as t:
        t.extractall(tmp_path, filter="data")

    wheel = build("wheel", tmp_path / sdist.name.removesuffix(".tar.gz"), tmp_path)

    assert contents(wheel) == expected()
