"""Virtual environments that have torch and the plugin in exactly one way.

Installing torch again for each would cost gigabytes and minutes: all that this environment has, but
for the plugin, is linked into a folder that the new one reads through a .pth file.
"""

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path


def make(folder: Path) -> Path:
    """A venv without the plugin; returns its Python."""
    base = folder / "base"
    base.mkdir(parents=True)
    for item in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if "replay_patch" not in item.name:
            (base / item.name).symlink_to(item)
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    python = folder / "venv" / "bin" / "python"
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
        text=True,
        capture_output=True,
        check=True,
    ).stdout.strip()
    (Path(site) / "base.pth").write_text(f"{base}\n")
    return python


def pip_install(python: Path, *args: str) -> None:
    """`pip install` into the venv of `python`, offline."""
    pip = [sys.executable, "-m", "pip", "--python", str(python), "-q"]
    pip += ["--disable-pip-version-check", "install", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--no-index", *args], check=True)
