"""Which of MindSpeed's features a replay is refused with, and how they are seen."""

import functools
import sys
import types
from types import SimpleNamespace
from typing import Any

import pytest

from replay_patch import RouteError
from replay_patch.megatron import ascend


def function_of(module: str) -> Any:
    return types.FunctionType((lambda: None).__code__, {"__name__": module})


@pytest.fixture
def mindspeed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imported, with these arguments."""
    arguments = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "mindspeed", types.ModuleType("mindspeed"))
    utils: Any = types.ModuleType("mindspeed.args_utils")
    utils.get_full_args = lambda: arguments
    monkeypatch.setitem(sys.modules, "mindspeed.args_utils", utils)
    return arguments


OPTIONS = [(option, feature) for feature in ascend.REFUSED for option in feature.options]


@pytest.mark.parametrize("option, feature", OPTIONS)
@pytest.mark.parametrize("where", ["config", "arguments"])
def test_each_feature_is_refused_by_name(
    mindspeed: Any, option: str, feature: ascend.Feature, where: str
) -> None:
    config = SimpleNamespace()
    name = option.strip("-").replace("-", "_")
    setattr(config if where == "config" else mindspeed, name, feature.value or "true")

    with pytest.raises(RouteError, match=option):
        ascend.refuse_features(config)


@pytest.mark.parametrize("off", [None, False, "false", "", 0])
def test_what_is_off_is_not_refused(mindspeed: Any, off: Any) -> None:
    names = [option.strip("-").replace("-", "_") for option, _ in OPTIONS]

    ascend.refuse_features(SimpleNamespace(**dict.fromkeys(names, off)))


def test_without_mindspeed_its_names_mean_nothing() -> None:
    ascend.refuse_features(SimpleNamespace(fix_router=True))


@pytest.mark.parametrize("module", ["mindspeed.core.x", "mindspeed_llm.x"])
def test_functions_of_mindspeed_are_seen_through(module: str) -> None:
    function = function_of(module)
    called = type("Called", (), {"__call__": lambda self: None, "__module__": module})()

    @functools.wraps(function_of("megatron.core.x"))
    def wrapper() -> None: ...

    assert ascend.is_of_mindspeed(function)
    assert ascend.is_of_mindspeed(functools.partial(functools.partial(function)))
    assert ascend.is_of_mindspeed(called)
    assert not ascend.is_of_mindspeed(wrapper)


@pytest.mark.parametrize(
    "module, name",
    [
        ("mindspeed.core.tensor_parallel.random", "--recompute-in-bubble"),
        ("mindspeed.core.pipeline_parallel.dualpipev.schedules", "dualpipev"),
        ("mindspeed.core.something.new", "does not know"),
    ],
)
def test_a_live_function_is_named_by_its_feature(
    mindspeed: Any, monkeypatch: pytest.MonkeyPatch, module: str, name: str
) -> None:
    monkeypatch.setattr(ascend.probe, "find", lambda place: function_of(module))

    with pytest.raises(RouteError, match=name):
        ascend.refuse_features(SimpleNamespace())
