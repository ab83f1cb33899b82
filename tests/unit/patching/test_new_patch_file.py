"""Patches are found by their files: a new one needs no other edit."""

import shutil
from pathlib import Path

from helpers import interpreters
from programs.patching import greeting, registry

import replay_patch


def test_a_new_file_is_found_and_applied_without_any_other_edit(tmp_path: Path) -> None:
    package = tmp_path / "replay_patch"
    shutil.copytree(Path(replay_patch.__file__).parent, package, ignore=no_bytecode)
    shutil.copy(str(greeting.__file__), package / "patches" / "megatron" / "greeting.py")
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
