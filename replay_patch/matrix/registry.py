"""What a check of the matrix is. Adding one is adding one function to a module of `checks/`."""

from collections.abc import Callable
from dataclasses import dataclass

from replay_patch.patching.patch import REPLAYING
from replay_patch.patching.registry import patches

__all__ = ["CHECKS", "Check", "Skip", "check"]


class Skip(Exception):
    """Raised by a check that says nothing about this Megatron; its text is the reason."""


@dataclass(frozen=True)
class Check:
    """A claim about the Megatron of this process: `run` returns if it holds, raises `Skip` if it
    does not apply, and anything else if it does not hold."""

    name: str
    sentence: str
    """What it proves, from the docstring."""
    patches: tuple[str, ...]
    """Patches without which it fails, on a release that needs them."""
    ranks: int
    """Processes it runs on."""
    run: Callable[[], None]
    mindspeed: bool = False
    """Whether it is about MindSpeed, and run only where there is one."""


CHECKS: dict[str, Check] = {}
"""Name -> check, in the order of definition. Filled by importing `replay_patch.matrix.checks`."""


def check(
    name: str,
    *,
    replays: bool = False,
    every_patch: bool = False,
    ranks: int = 1,
    mindspeed: bool = False,
) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Register a function as the check `name` of `--only`; its docstring is what it proves. It runs
    on the CPU bed, with the plugin active and Megatron imported, in a process of its own, to which
    it may do anything.

    Args:
        replays: it records or replays, for which the vital patches are needed.
        every_patch: it asks whether all patches are in place.
        ranks: processes that it starts with `ranks.launch`, if more than one.
        mindspeed: it is about MindSpeed, and run only where there is one.
    """

    def register(function: Callable[[], None]) -> Callable[[], None]:
        if name in CHECKS or not function.__doc__:
            raise ValueError(f"check {name!r} is registered twice, or has no docstring")
        sentence = " ".join(function.__doc__.split())
        groups = {name} | ({REPLAYING} if replays else set())
        # A test leaves out each patch in turn, and wants exactly these checks to turn red.
        needs = tuple(
            patch.name
            for patch in patches()
            if every_patch or groups & {*patch.checks} or (replays and patch.vital)
        )
        CHECKS[name] = Check(name, sentence, needs, ranks, function, mindspeed)
        return function

    return register
