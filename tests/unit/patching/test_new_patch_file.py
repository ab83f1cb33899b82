"""Patches are found by their files: a new one needs no other edit."""

import shutil
from pathlib import Path

from helpers import interpreters
from programs.patching import registry

import replay_patch

NEW = '''
"""A patch that nobody has heard of."""

import sys

from replay_patch.patching import probe
from replay_patch.patching.patch import Patch
from replay_patch.patching.transaction import Transaction


def _needed() -> tuple[bool, str]:
    return probe.find("greeting:hello") is not None, "it greets"


def _apply(transaction: Transaction) -> None:
    transaction.wrap_everywhere(sys.modules["greeting"], "hello", louder)


def louder(original):
    def hello():
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
'''


def test_a_new_file_is_found_and_applied_without_any_other_edit(tmp_path: Path) -> None:
    package = tmp_path / "replay_patch"
    shutil.copytree(Path(replay_patch.__file__).parent, package, ignore=no_bytecode)
    (package / "patches" / "megatron" / "greeting.py").write_text(NEW)
    (tmp_path / "greeting.py").write_text("def hello():\n    return 'good morning'\n")

    answer = interpreters.run(registry.new_patch, "greeting", path=tmp_path, REPLAY_PATCH="1")

    assert answer == {
        "package": str(package),
        "found after": "mtp_depth",
        "before the import": "not needed",
        "after it": "active",
        "greeting": "GOOD MORNING",
        "without the plugin": "good morning",
    }


no_bytecode = shutil.ignore_patterns("__pycache__")
