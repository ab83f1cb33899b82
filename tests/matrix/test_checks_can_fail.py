"""Leaving out a patch turns red exactly the checks that name it, on a release that needs it."""

import functools
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers import interpreters, matrix_runs
from helpers.matrix_runs import OF_MEGATRON, RELEASES
from programs.matrix import patch_states

from replay_patch.matrix.checks import CHECKS
from replay_patch.patching.registry import patches

pytestmark = pytest.mark.exhaustive

OF_MINDSPEED = ["rebuilt_config", "repatch"]  # needed nowhere else
NAMES = [p.name for p in patches() if not p.optional and p.name not in OF_MINDSPEED]
CHECKED = [CHECKS[name] for name in OF_MEGATRON]
STANDIN = ("--mindspeed-path", f"{Path(__file__).parents[1] / 'standins'}={RELEASES[0]}")


@functools.cache
def needed(release: str) -> frozenset[str]:
    """The patches that are active on this release, and not just there."""
    megatron = matrix_runs.release(release)
    states = interpreters.run(patch_states.states, bed=True, path=megatron, REPLAY_PATCH="1")
    assert set(states.values()) == {"active", "not needed"}
    return frozenset(name for name, state in states.items() if state == "active")


def needing(patch: str) -> str:
    return next(release for release in RELEASES if patch in needed(release))


def run_without(patch: str) -> list[str]:
    """All checks, but of those that do not name the patch and take most of the time: of those on
    several ranks, which share their code, only one, and the one that starts interpreters of its
    own, which no patch is in, only without the first patch."""
    sample = {"pp"} | {c.name for c in CHECKED if c.ranks == 1} - {"off-is-off"}
    sample |= {"off-is-off"} if patch == NAMES[0] else set()
    return [c.name for c in CHECKED if patch in c.patches or c.name in sample]


@pytest.fixture(scope="module")
def without(clean: matrix_runs.Done) -> Iterator[dict[str, "Future[matrix_runs.Done]"]]:
    """A run without each patch; two at a time, since each is one environment."""

    def run(patch: str) -> matrix_runs.Done:
        options = ("--only", ",".join(run_without(patch)), "--jobs", "1")
        return matrix_runs.run("--megatron", needing(patch), *options, REPLAY_PATCH_SKIP=patch)

    with ThreadPoolExecutor(2) as pool:
        yield {patch: pool.submit(run, patch) for patch in NAMES}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("patch", NAMES)
def test_exactly_the_checks_that_name_a_patch_fail_without_it(
    patch: str, without: dict[str, "Future[matrix_runs.Done]"], clean: matrix_runs.Done
) -> None:
    done, release = without[patch].result(), needing(patch)

    skipped = {check for check, status in clean.statuses(release).items() if status == "skip"}
    expected = {c.name for c in CHECKED if patch in c.patches} - skipped
    statuses = done.statuses(release)
    assert {check for check, status in statuses.items() if status == "fail"} == expected
    others = {check: status for check, status in statuses.items() if check not in expected}
    assert others == {check: clean.statuses(release)[check] for check in others}
    assert done.code == 1


@pytest.mark.parametrize("patch", NAMES)
def test_each_patch_has_a_check_aimed_at_it_alone(patch: str, clean: matrix_runs.Done) -> None:
    aimed = [
        check.name
        for release in RELEASES
        for check in CHECKED
        if needed(release).intersection(check.patches) == {patch}
        and clean.statuses(release)[check.name] == "pass"
    ]

    assert aimed


@functools.cache
def with_mindspeed(skip: str = "") -> matrix_runs.Done:
    """The checks of MindSpeed, and those that name one of its patches, on the stand-in."""
    names = [c.name for c in CHECKS.values() if c.mindspeed or {*OF_MINDSPEED} & {*c.patches}]
    return matrix_runs.run(*STANDIN, "--only", ",".join(names), REPLAY_PATCH_SKIP=skip)


@pytest.mark.parametrize("patch", OF_MINDSPEED)
def test_exactly_the_checks_that_name_a_patch_fail_without_it_on_mindspeed(patch: str) -> None:
    clean, found = (with_mindspeed(skip).statuses(RELEASES[0]) for skip in ("", patch))

    assert set(clean.values()) == {"pass", "skip"}
    named = {name for name in clean if patch in CHECKS[name].patches and clean[name] == "pass"}
    assert found == clean | dict.fromkeys(named, "fail")
