"""What a patch can ask of a function, on a module of the tests' own."""

import functools
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from replay_patch.patching import probe

NAME = "a_probed_library"
TEXT = '''
import functools

LIMIT = 256


def documented(ids, mask=None):
    """try: ... finally: this is no code."""
    # finally: nor is this
    text = "a constant"  # .to(torch.uint8)
    return helper(ids.narrow, text)


def outer(config):
    def inner(row):
        """What inner does."""
        return row.deep * LIMIT + 300

    async def later():
        return inner_constant("later")

    return inner, config


def wrapper(function):
    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapped


wrapped = wrapper(wrapper(documented))


async def generate(prompt_ids, *, sampling_params):
    return await engine(prompt_ids).routed_experts


def imports_by_itself():
    from os import path

    return path.join(LIMIT.bit_length, sep)


class Base:
    @staticmethod
    def static(rows):
        return rows.of_a_static_method

    @classmethod
    def made(cls, rows):
        return rows.of_a_class_method


class Server(Base):
    limit = LIMIT

    async def generate(self, prompt_ids):
        return prompt_ids.of_a_server
'''


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    path = tmp_path / f"{NAME}.py"
    path.write_text(TEXT)
    spec = importlib.util.spec_from_file_location(NAME, path)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    monkeypatch.setitem(sys.modules, NAME, made)
    return made


def target(path: str) -> str:
    return f"{NAME}:{path}"


READERS: list[tuple[Callable[[Any], Any], Any]] = [
    (probe.parameters, frozenset()),
    (probe.parameters_of_code, ()),
    (probe.names_used, frozenset()),
    (probe.globals_used, frozenset()),
    (probe.constants, frozenset()),
    (probe.source, ""),
]


@pytest.mark.parametrize("missing", ["nowhere:f", target("nothing"), target("Server.nothing")])
@pytest.mark.parametrize("read, empty", READERS, ids=lambda each: getattr(each, "__name__", ""))
def test_what_is_not_there_has_nothing(read: Any, empty: Any, missing: str) -> None:
    assert probe.find(missing) is None
    assert read(missing) == empty


@pytest.mark.parametrize("read, empty", READERS[1:], ids=lambda each: getattr(each, "__name__", ""))
def test_a_function_without_python_code_has_nothing(read: Any, empty: Any) -> None:
    assert read("math:sqrt") == read(target("LIMIT")) == empty


def test_what_stands_in_a_class_is_found_as_it_stands_there(module: Any) -> None:
    assert probe.find(target("Server")) is module.Server
    assert probe.find(target("Server.static")) is vars(module.Base)["static"]
    assert isinstance(probe.find(target("Server.static")), staticmethod)
    assert probe.find(target("Server.limit")) == 256
    assert probe.find(target("Server.__mro__")) is module.Server.__mro__


def test_of_a_ray_actor_the_class_that_ray_runs_is_found(module: Any) -> None:
    metadata = types.SimpleNamespace(modified_class=module.Server)
    module.Actor = types.SimpleNamespace(__ray_metadata__=metadata)

    assert probe.find(target("Actor")) is module.Server
    assert "of_a_server" in probe.names_used(target("Actor.generate"))
    assert "of_a_static_method" in probe.names_used(target("Actor.static"))


@pytest.mark.parametrize("path", ["documented", "wrapped"])
def test_wrappers_are_looked_through(path: str, module: Any) -> None:
    assert probe.unwrapped(target(path)) is module.documented
    assert probe.parameters(target(path)) == {"ids", "mask"}
    assert probe.parameters_of_code(target(path)) == ("ids", "mask")
    assert {"helper", "narrow", "ids", "text"} <= probe.names_used(target(path))


def test_a_ring_of_wrappers_ends(module: Any) -> None:
    module.documented.__wrapped__ = module.wrapped

    assert "narrow" in probe.names_used(target("documented")) | probe.names_used(target("wrapped"))


def test_static_and_class_methods_are_read() -> None:
    assert "of_a_static_method" in probe.names_used(target("Base.static"))
    assert "of_a_class_method" in probe.names_used(target("Base.made"))
    assert probe.source(target("Base.static")).startswith("@staticmethod\ndef static(rows):")


def test_functions_inside_are_read_with_the_one_around_them() -> None:
    assert {"deep", "row", "inner", "config", "LIMIT"} <= probe.names_used(target("outer"))
    assert {300, "later"} <= probe.constants(target("outer"))
    assert probe.globals_used(target("outer")) == {"LIMIT", "inner_constant"}


@pytest.mark.parametrize("path, name", [("generate", "routed_experts"), ("Server.generate", "of_")])
def test_async_functions_are_read(path: str, name: str) -> None:
    assert any(used.startswith(name) for used in probe.names_used(target(path)))
    assert "prompt_ids" in probe.parameters_of_code(target(path))
    assert probe.source(target(path)).startswith("async def generate")


def test_names_that_a_function_imports_for_itself_are_no_globals_of_its_module() -> None:
    assert {"path", "sep", "bit_length"} <= probe.names_used(target("imports_by_itself"))
    assert probe.globals_used(target("imports_by_itself")) == {"LIMIT", "sep"}


def test_comments_and_docstrings_are_no_source() -> None:
    text = probe.source(target("documented"))

    assert "finally" not in text
    assert "uint8" not in text
    assert "text = 'a constant'" in text
    assert "What inner does" not in probe.source(target("outer"))


def test_an_edited_signature_is_not_what_the_code_takes(module: Any) -> None:
    module.documented.__signature__ = inspect.Signature()

    assert probe.parameters(target("documented")) == frozenset()
    assert probe.parameters_of_code(target("documented")) == ("ids", "mask")


def test_a_function_may_be_asked_itself() -> None:
    def local(ids: Any) -> Any:
        return ids.to_be_read

    for made in (local, staticmethod(local), functools.wraps(local)(lambda *args: None)):
        assert "to_be_read" in probe.names_used(made)
        assert "ids.to_be_read" in probe.source(made)
        assert probe.parameters_of_code(made) == ("ids",)


def test_where_no_source_can_be_had_there_is_none() -> None:
    names: dict[str, Any] = {}
    exec("def made(ids):\n    return ids.narrow", names)

    assert probe.source(names["made"]) == ""
    assert "narrow" in probe.names_used(names["made"])
