"""A patch that nobody has heard of; tests/unit/patching/test_registry.py drops it into patches/."""

import sys
from collections.abc import Callable

from replay_patch.patching import Patch, Transaction, probe


def _needed() -> tuple[bool, str]:
    return probe.find("greeting:hello") is not None, "it greets"


def _apply(transaction: Transaction) -> None:
    transaction.wrap_everywhere(sys.modules["greeting"], "hello", _louder)


def _louder(original: Callable[[], str]) -> Callable[[], str]:
    def hello() -> str:
        return original().upper()

    return hello


PATCH = Patch(
    name="greeting",
    library="megatron",
    targets=("greeting:hello",),
    modules=("greeting",),
    requires="greeting",
    why="It is hardly heard.",
    how="In capital letters.",
    upstream="none: it is made up",
    remove_when="it is louder",
    needed=_needed,
    apply=_apply,
    after=("mtp_depth",),
)
