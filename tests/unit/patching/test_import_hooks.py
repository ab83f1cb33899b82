"""Modules of the tests' own, on disk, imported in a fresh interpreter."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PRELUDE = """
import sys
from replay_patch.patching.import_hooks import when_imported
def told(name):
    def complete():
        print("complete:", sorted(vars(sys.modules[name]).keys() & {"a", "z"}))
    when_imported(name, complete)
"""


def run(folder: Path, code: str, **modules: str) -> list[str]:
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(text))
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code)],
        cwd=folder,
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_now_if_imported(tmp_path: Path) -> None:
    assert run(tmp_path, "import m; told('m')", m="a = z = 1") == ["complete: ['a', 'z']"]


def test_later_if_not_imported(tmp_path: Path) -> None:
    out = run(tmp_path, "told('m'); print('waiting'); import m", m="a = z = 1")

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
    out = run(tmp_path, "import m; print(type(m.__spec__).__mro__[0].__module__)", m=m)

    assert out == ["in the middle", *["complete: ['a', 'z']"] * times, "_frozen_importlib"]


RETRY = """
import os
try:
    import m
except ImportError as error:
    print(error)
os.environ["FIXED"] = "1"
import m
"""


def test_an_import_that_fails_and_then_succeeds(tmp_path: Path) -> None:
    m = """
        import os
        a = 1
        if "FIXED" not in os.environ:
            raise ImportError("broken")
        z = 1
    """

    assert run(tmp_path, "told('m')" + RETRY, m=m) == ["broken", "complete: ['a', 'z']"]


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

    assert run(tmp_path, RETRY, m=m) == ["broken", "complete: ['a', 'z']"]
