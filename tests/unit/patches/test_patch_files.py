"""Every file in patches/ is one complete, registered patch; the docs and the wheel have them."""

import dataclasses
import importlib
from pathlib import Path

import pytest

from replay_patch.matrix.checks import CHECKS
from replay_patch.patching.patch import REPLAYING, Patch
from replay_patch.patching.registry import patches, vital_names

ROOT = Path(__file__).parents[3]
FILES = sorted(p.stem for p in (ROOT / "patches").glob("*/*.py") if not p.stem.startswith("_"))


def test_every_file_is_registered_under_its_own_name() -> None:
    assert sorted(p.name for p in patches()) == FILES


@pytest.mark.parametrize("name", FILES)
def test_every_file_holds_one_patch(name: str) -> None:
    [path] = (ROOT / "patches").glob(f"*/{name}.py")
    module = importlib.import_module(f"replay_patch.patches.{path.parent.name}.{name}")

    assert [p for p in vars(module).values() if isinstance(p, Patch)] == [module.PATCH]


@pytest.mark.parametrize("patch", patches(), ids=lambda p: p.name)
def test_every_patch_gives_its_reasons(patch: Patch) -> None:
    empty = {f.name for f in dataclasses.fields(patch) if not getattr(patch, f.name)}

    assert empty <= {"after", "before_import", "checks", "relies_on", "still_works", "vital"}
    assert all(":" in target for target in patch.targets)


@pytest.mark.parametrize("patch", patches(), ids=lambda p: p.name)
def test_every_patch_lies_in_the_folder_of_its_library(patch: Patch) -> None:
    assert (ROOT / "patches" / patch.library / f"{patch.name}.py").is_file()
    assert patch.optional or patch.requires in patch.modules


@pytest.mark.parametrize("patch", patches(), ids=lambda p: p.name)
def test_every_patch_of_megatron_names_checks_that_there_are(patch: Patch) -> None:
    assert {*patch.checks} <= {*CHECKS, REPLAYING}
    assert patch.optional or patch.checks


def test_replay_stands_on_registered_patches() -> None:
    assert "router_guard" in vital_names()
    assert set(vital_names()) < {p.name for p in patches()}
