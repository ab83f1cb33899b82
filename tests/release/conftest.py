"""Tests on one real Megatron-core release: the one that comes first on the path.

`tests/run.py` starts one pytest for each release, with REPLAY_PATCH=1. The CPU bed goes in before
Megatron is imported (helpers/cpu_bed.py); the plugin is already active, through its entry point.
"""

import logging
from collections.abc import Callable, Iterator

import pytest
import torch
from helpers.cpu_bed import megatron, pytest_report_header

import replay_patch
from replay_patch import refusals
from replay_patch.matrix import tiny
from replay_patch.matrix.environments import NEWEST

__all__ = ["pytest_report_header"]

# The oldest release (ours is the seam), and the newest (its own is).
SEAMS = ("0.12.0", NEWEST)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of how we get into a process start one each, seconds long: not on every release."""
    seams = SEAMS[:1] if config.getoption("few") else SEAMS
    if megatron.core.__version__ in seams:
        return
    reason = f"about the mechanism, not the release: on {', '.join(seams)}"
    for item in items:
        if item.get_closest_marker("mechanism"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def groups() -> Iterator[None]:
    """One-process Megatron groups, for the whole run: forking ranks after this would hang."""
    tiny.init()
    yield
    tiny.shutdown()


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Fixed seeds, and none of the process-wide state that Megatron and replay keep."""
    torch.manual_seed(0)
    yield
    tiny.clear_aux_tracker()
    from megatron.core.transformer.moe.router_replay import RouterReplay

    RouterReplay.clear_global_router_replay_instances()


@pytest.fixture
def megatron_version() -> str:
    return str(megatron.core.__version__)


@pytest.fixture
def warnings(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], list[str]]:
    """Our warnings so far, as if no other test had drawn one."""
    monkeypatch.setattr(refusals, "_warned", set())
    caplog.set_level(logging.WARNING, "replay_patch")
    return lambda: [r.getMessage() for r in caplog.records if r.name.startswith("replay_patch")]


@pytest.fixture
def strict() -> Iterator[None]:
    replay_patch.activate(strict=True)
    yield
    replay_patch.activate(strict=False)
