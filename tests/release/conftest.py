"""Tests on one real Megatron-core release: the one that comes first on the path.

`tests/run.py` starts one pytest for each release, with REPLAY_PATCH=1. The CPU bed goes in before
Megatron is imported; the plugin is already active, through its entry point.
"""

import logging
from collections.abc import Iterator

import pytest
import torch

import replay_patch
from replay_patch.matrix import cpu, tiny

cpu.install()

# After the bed. These two bring every module that a patch waits for.
import megatron.core.models.gpt.gpt_model
import megatron.core.transformer.moe.router

cpu.patch_megatron()
logging.getLogger("megatron").setLevel(logging.ERROR)


def pytest_report_header() -> str:
    status = replay_patch.status()
    return f"megatron-core {megatron.core.__version__}, plugin activated by {status.trigger}"


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
