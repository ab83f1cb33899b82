"""Tests on several gloo ranks of one real Megatron-core release, the one first on the path.

This process only imports, which makes forking ranks from it cheap. It must never make process
groups, not even of one process: ranks forked after that would hang, and `launch` refuses.
"""

import logging

import replay_patch
from replay_patch.matrix import cpu

cpu.install()

# After the bed. These two bring every module that a patch waits for.
import megatron.core.models.gpt.gpt_model
import megatron.core.transformer.moe.router

cpu.patch_megatron()
logging.getLogger("megatron").setLevel(logging.ERROR)


def pytest_report_header() -> str:
    status = replay_patch.status()
    return f"megatron-core {megatron.core.__version__}, plugin activated by {status.trigger}"
