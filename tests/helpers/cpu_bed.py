"""Import this first: the CPU bed, then Megatron with every module that a patch waits for."""

import logging

import replay_patch
from replay_patch.matrix import cpu

cpu.install()

import megatron.core.models.gpt.gpt_model
import megatron.core.transformer.moe.router

cpu.patch_megatron()
logging.getLogger("megatron").setLevel(logging.ERROR)


def pytest_report_header() -> str:
    status = replay_patch.status()
    return f"megatron-core {megatron.core.__version__}, plugin activated by {status.trigger}"
