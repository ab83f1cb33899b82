"""Without one of the padding patches exactly the matrix checks that name it turn red."""

import os

import pytest

import replay_patch
from replay_patch.matrix.cell_processes import try_check
from replay_patch.matrix.checks import CHECKS, padding
from replay_patch.matrix.ranks import launch
from replay_patch.patching.patch import ACTIVE

PATCHES = (
    "padding_mask",
    "expert_bias_mask",
    "padding_only_loss",
    "padding_mask_shape",
    "mtp_recompute_mask",
    "block_recompute_mask",
)
NAMES = ["padding-mask", *(n for n, c in CHECKS.items() if c.run.__module__ == padding.__name__)]


def one_check(rank: int, world: int, init_file: str, name: str) -> str:
    return try_check(CHECKS[name])[0]


def without(rank: int, world: int, init_file: str, patch: str) -> dict[str, str]:
    """The status of each check, in a process that has activated the plugin without a patch."""
    os.environ["REPLAY_PATCH_SKIP"] = patch
    replay_patch.deactivate()
    replay_patch.activate()
    return {name: launch(one_check, 1, (name,))[0] for name in NAMES}


def needed(patch: str) -> bool:
    states = {p.name: p.state for p in replay_patch.status().patches}
    return states[patch] == ACTIVE


@pytest.mark.parametrize("patch", PATCHES)
def test_exactly_the_checks_that_name_a_patch_need_it(patch: str) -> None:
    if not needed(patch):
        pytest.skip("not needed on this release")

    [found] = launch(without, 1, (patch,))

    red = {name for name, status in found.items() if status == "fail"}
    skipped = {name for name, status in found.items() if status == "skip"}
    assert red == {name for name in NAMES if patch in CHECKS[name].patches} - skipped
    assert red


@pytest.mark.parametrize("patch", PATCHES)
def test_each_patch_has_a_check_of_its_own(patch: str) -> None:
    assert (patch,) in [CHECKS[name].patches for name in NAMES]
