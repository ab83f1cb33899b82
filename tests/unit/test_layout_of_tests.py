"""No folder of tests that Python finds modules in hides a library, or becomes a part of it."""

import importlib.machinery
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ("", "on_mindspeed", "programs/install", "programs/patching")
OURS = {"helpers", "programs", "standins"}
FRIENDS = {"apex", "mbridge", "megatron", "mindspeed", "sglang", "skyrl", "skyrl_gym"}
FRIENDS |= {"torch_npu", "transformer_engine", "verl", "vllm"}
"""What tests and patches import where it is there: it need not be installed here."""


def test_the_folders_on_the_path_hide_no_library() -> None:
    assert {str(path): hidden(path) for path in on_the_path()} == {
        str(path): set() for path in on_the_path()
    }


def test_this_test_sees_a_folder_that_hides_one(tmp_path: Path) -> None:
    (tmp_path / "verl").mkdir()
    (tmp_path / "json.py").write_text("")
    (tmp_path / "quiet").mkdir()

    assert hidden(tmp_path) == {"json", "verl"}


def on_the_path() -> list[Path]:
    """pytest's `pythonpath`, and the folders of programs that are run by their path, which Python
    puts first."""
    tomllib = pytest.importorskip("tomllib")  # from Python 3.11
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]
    named = [ROOT / name for name in settings["ini_options"]["pythonpath"]]
    scripts = [ROOT / "tests" / name for name in SCRIPTS]
    return list(dict.fromkeys([*named, *scripts]))


def hidden(folder: Path) -> set[str]:
    """The names in it that are also those of a module of Python's, an installed one or a friend."""
    names = {
        path.stem
        for path in folder.iterdir()
        if path.suffix == ".py" or (path.is_dir() and path.name.isidentifier())
    }
    installed = [sysconfig.get_paths()[name] for name in ("purelib", "platlib")]
    others = {
        name
        for name in names - OURS
        if (spec := importlib.machinery.PathFinder.find_spec(name, installed))
        and folder not in [Path(str(spec.origin)).parent]
    }
    return (names & (FRIENDS | sys.stdlib_module_names)) | others
