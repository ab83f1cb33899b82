"""Every file in patches/ is one complete, registered patch; the docs and the wheel have them."""

import dataclasses
import importlib
from pathlib import Path

import pytest

from replay_patch.patches import PATCHES, REPLAY_PATCHES
from replay_patch.patching.patch import Patch

ROOT = Path(__file__).parents[2]
FILES = sorted(p.stem for p in (ROOT / "patches").glob("*/*.py") if p.stem != "__init__")


def test_every_file_is_registered_under_its_own_name() -> None:
    assert sorted(p.name for p in PATCHES) == FILES


@pytest.mark.parametrize("name", FILES)
def test_every_file_holds_one_patch(name: str) -> None:
    [path] = (ROOT / "patches").glob(f"*/{name}.py")
    module = importlib.import_module(f"replay_patch.patches.{path.parent.name}.{name}")

    assert [p for p in vars(module).values() if isinstance(p, Patch)] == [module.PATCH]


@pytest.mark.parametrize("patch", PATCHES, ids=lambda p: p.name)
def test_every_patch_gives_its_reasons(patch: Patch) -> None:
    empty = {f.name for f in dataclasses.fields(patch) if not getattr(patch, f.name)}

    assert empty <= {"arm", "vital", "working"}
    assert all(":" in target for target in patch.targets)


def test_replay_stands_on_registered_patches() -> None:
    assert "router_guard" in REPLAY_PATCHES
    assert set(REPLAY_PATCHES) < {p.name for p in PATCHES}
