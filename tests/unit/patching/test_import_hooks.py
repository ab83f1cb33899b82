"""Modules of the tests' own, on disk, imported in a fresh interpreter."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from programs.patching import import_hooks


def run(folder: Path, function: Callable[[], None], **modules: str) -> list[str]:
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(text))
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, str(import_hooks.__file__), function.__name__],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path},
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_now_if_imported(tmp_path: Path) -> None:
    assert run(tmp_path, import_hooks.imported_before, m="a = z = 1") == ["complete: ['a', 'z']"]


def test_later_if_not_imported(tmp_path: Path) -> None:
    out = run(tmp_path, import_hooks.imported_later, m="a = z = 1")

    assert out == ["waiting", "complete: ['a', 'z']"]


@pytest.mark.parametrize("times", [1, 2])
def test_a_module_that_is_being_imported_is_waited_for(tmp_path: Path, times: int) -> None:
    m = f"""
        a = 1
        from __main__ import told
        [told("m") for _ in range({times})]
        print("in the middle")
        z = 1
    """
    out = run(tmp_path, import_hooks.told_by_the_module, m=m)

    assert out == ["in the middle", *["complete: ['a', 'z']"] * times, "_frozen_importlib"]


def test_an_import_that_fails_and_then_succeeds(tmp_path: Path) -> None:
    m = """
        import os
        a = 1
        if "FIXED" not in os.environ:
            raise ImportError("broken")
        z = 1
    """

    assert run(tmp_path, import_hooks.told_before_a_failure, m=m) == [
        "broken",
        "complete: ['a', 'z']",
    ]


def test_an_import_that_fails_while_it_is_waited_for(tmp_path: Path) -> None:
    m = """
        import os
        a = 1
        if "FIXED" not in os.environ:
            from __main__ import told
            told("m")
            raise ImportError("broken")
        z = 1
    """

    assert run(tmp_path, import_hooks.failing_first, m=m) == ["broken", "complete: ['a', 'z']"]
