"""For tests/unit/matrix/test_cpu.py: the CPU bed before any Megatron."""

import os
import sys
from typing import Any


def imported() -> list[Any]:
    before = list(sys.meta_path), list(sys.path_hooks), dict(os.environ)
    from replay_patch.matrix import cpu, ranks, tiny

    same = before == (sys.meta_path, sys.path_hooks, dict(os.environ))
    loaded = {"torch", "numpy", "wrapt", "megatron"} & set(sys.modules)
    return [same, sorted(loaded), cpu.installed()]


def installed_again() -> list[Any]:
    from replay_patch.matrix import cpu

    cpu.install()
    import torch

    def state() -> list[int]:
        return [id(f) for f in (torch.ones, torch.Tensor.type, torch.compile, *sys.meta_path)]

    before = state()
    cpu.install()
    cpu.install_once()
    return [before == state(), cpu.installed(), str(torch.ones(1, device="cuda").device)]


def refusal(options: dict[str, bool], late: bool = False) -> str:
    """Of `install(**options)`; `late`: after Megatron."""
    if late:
        sys.modules["megatron.core"] = sys
    from replay_patch.matrix import cpu

    try:
        cpu.install(**options)
    except RuntimeError as error:
        return str(error)
    return "no error"


def compiler_stays() -> bool:
    import torch

    from replay_patch.matrix import cpu

    compiler = torch.compile
    cpu.install(torch_compile=True)
    cpu.install_once()
    return torch.compile is compiler


def listed() -> list[str]:
    """What `replay-patch matrix --list` loads of what is slow to load."""
    import contextlib

    from replay_patch import cli

    with contextlib.redirect_stdout(sys.stderr):
        cli.main(["matrix", "--list"])
    return [name for name in ("torch", "megatron") if name in sys.modules]
