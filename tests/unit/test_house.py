"""The contracts of import-linter see what they forbid, wherever it is planted."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("importlinter", reason="make lint has it, and so has the extra `lint`")

ROOT = Path(__file__).parents[2]
# Not the command `lint-imports`, which the environment that has the wheel only lacks.
LINT = "from importlinter.cli import lint_imports_command as lint; lint()"


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A copy of the package, its patches, and the symlink by which the one finds the other."""
    no_caches = shutil.ignore_patterns("__pycache__")
    for folder in ("replay_patch", "patches"):
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=no_caches)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    assert (tmp_path / "replay_patch" / "patches").is_symlink()
    return tmp_path


def lint(house: Path) -> tuple[int, str]:
    """The exit code, and what was printed, without its line breaks."""
    command = [sys.executable, "-c", LINT, "--no-cache"]
    done = subprocess.run(command, cwd=house, capture_output=True, text=True, check=False)
    return done.returncode, " ".join(done.stdout.split())


def test_the_house_is_in_order(house: Path) -> None:
    code, text = lint(house)

    assert code == 0, text


IN_A_FUNCTION = "def planted():\n    "


@pytest.mark.parametrize(
    "file, line, broken",
    [
        (
            "replay_patch/patching/wrappers.py",
            "import replay_patch.sessions.schedule",
            "replay_patch.patching.wrappers -> replay_patch.sessions.schedule",
        ),
        (
            "replay_patch/routes/axis.py",
            f"{IN_A_FUNCTION}from replay_patch.megatron import routers",
            "replay_patch.routes.axis -> replay_patch.megatron.routers",
        ),
        (
            "patches/megatron/mtp_depth.py",
            "from replay_patch.matrix import cpu",
            "replay_patch.patches.megatron.mtp_depth -> replay_patch.matrix.cpu",
        ),
        (
            "patches/verl/verl_packing.py",
            f"{IN_A_FUNCTION}import replay_patch.doctor",
            "replay_patch.patches.verl.verl_packing -> replay_patch.doctor",
        ),
        (
            "replay_patch/cli.py",  # which lies above the patches
            f"{IN_A_FUNCTION}from replay_patch.patches.megatron import mtp_depth",
            "replay_patch.cli -> replay_patch.patches.megatron.mtp_depth",
        ),
        (
            "replay_patch/patching/patch.py",
            f"{IN_A_FUNCTION}from replay_patch.patching import registry",
            "No cycles are allowed in replay_patch.patching.",
        ),
        ("replay_patch/loft/__init__.py", "", "- replay_patch.loft"),
    ],
)
def test_a_forbidden_import_is_seen(file: str, line: str, broken: str, house: Path) -> None:
    path = house / file
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as module:
        module.write(f"\n\n{line}\n")

    code, text = lint(house)

    assert code != 0
    assert broken in text
