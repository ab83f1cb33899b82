"""`replay-patch doctor` for tests/release/test_doctor.py.

    python -m programs.doctor [--broken-router] ARGUMENTS

As a job on a GPU would find it: the doctor itself needs no CPU bed, but triton may be missing.
"""

import sys
from typing import Any


class BrokenRouter:
    """A finder with which Megatron's router cannot be imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "megatron.core.transformer.moe.router":
            raise ImportError("a distinctive text")


if "--broken-router" in sys.argv:
    sys.argv.remove("--broken-router")
    sys.meta_path.insert(0, BrokenRouter())  # type: ignore[arg-type]

from replay_patch.megatron import no_triton

no_triton.provide()
from replay_patch import cli

sys.exit(cli.main(["doctor", *sys.argv[1:]]))
