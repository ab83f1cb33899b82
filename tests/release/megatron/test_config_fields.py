"""The config fields on TransformerConfig, MLATransformerConfig and subclasses of every kind."""

import argparse
import copy
import dataclasses
import inspect
import pickle
from typing import Any

import pytest
from helpers import interpreters
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from programs.megatron import config_classes
from standins.mindspeed.core.megatron_basic import arguments_basic

import replay_patch
from replay_patch.matrix import tiny
from replay_patch.megatron.config import replay_enabled, router_fusion

NAMES = ("enable_routing_replay", "moe_enable_routing_replay", "moe_router_fusion")
SIZES = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2}


@dataclasses.dataclass
class Later(TransformerConfig):
    """A trainer's provider class, made after activation."""

    extra: int = 3


@dataclasses.dataclass
class LaterMLA(MLATransformerConfig):
    extra: int = 3


class Plain(TransformerConfig):
    """Not a dataclass, with an `__init__` of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.extra = 3


@dataclasses.dataclass
class Declaring(TransformerConfig):
    """Has a field of our name already, with its own default."""

    enable_routing_replay: bool = True


CLASSES = (TransformerConfig, MLATransformerConfig, Later, LaterMLA, Plain)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("cls", CLASSES)
def test_true_is_kept_and_the_default_is_false(cls: type, name: str) -> None:
    assert getattr(cls(**SIZES), name) is False
    assert getattr(cls(**SIZES, **{name: True}), name) is True


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("cls", [c for c in CLASSES if c is not Plain])
def test_each_is_a_real_field(cls: Any, name: str) -> None:
    fields = [f for f in dataclasses.fields(cls) if f.name == name]

    assert [(f.type, f.default, f.init) for f in fields] == [(bool, False, True)]
    assert name in inspect.signature(cls).parameters
    assert dataclasses.asdict(cls(**SIZES, **{name: True}))[name] is True


@pytest.mark.parametrize("cls", [c for c in CLASSES if c is not Plain])
def test_replace_copy_and_pickle_keep_it(cls: Any) -> None:
    config = cls(**SIZES, enable_routing_replay=True)

    copies = [
        dataclasses.replace(config, hidden_size=16),
        copy.copy(config),
        copy.deepcopy(config),
        pickle.loads(pickle.dumps(config)),
    ]

    assert [c.enable_routing_replay for c in copies] == [True] * 4
    assert copies[0].hidden_size == 16


def test_a_subclass_keeps_a_default_of_its_own() -> None:
    assert Declaring(**SIZES).enable_routing_replay is True
    assert Declaring(**SIZES, enable_routing_replay=False).enable_routing_replay is False


def test_an_unknown_argument_is_still_an_error() -> None:
    with pytest.raises(TypeError, match="no_such_field"):
        TransformerConfig(**SIZES, no_such_field=1)


def test_positional_arguments_keep_their_places() -> None:
    parameters = inspect.signature(TransformerConfig).parameters
    first = next(iter(parameters))
    others = {k: v for k, v in SIZES.items() if k != first}

    assert getattr(TransformerConfig(2, **others), first) == 2
    assert parameters["enable_routing_replay"].kind is inspect.Parameter.KEYWORD_ONLY


@pytest.mark.parametrize("name", NAMES[:2])
@pytest.mark.parametrize(
    "value, on", [(True, True), (False, False), ("true", True), ("false", False), ("True", True)]
)
def test_either_name_turns_replay_on(name: str, value: Any, on: bool) -> None:
    config = TransformerConfig(**SIZES, **{name: value})

    assert replay_enabled(config) is on


def test_an_attribute_set_after_construction_counts() -> None:
    config = TransformerConfig(**SIZES)
    config.enable_routing_replay = True

    assert replay_enabled(config)


def test_a_word_that_is_neither_is_refused() -> None:
    with pytest.raises(replay_patch.SettingsError, match="enable_routing_replay='perhaps'"):
        TransformerConfig(**SIZES, enable_routing_replay="perhaps")


def test_a_config_of_another_library_reads_as_off() -> None:
    assert not replay_enabled(object())
    assert not router_fusion(object())


def test_the_base_accepts_a_trainers_provider_in_a_real_model() -> None:
    config = tiny.moe_config(Later, enable_routing_replay=True)

    model = tiny.gpt_model(config)

    assert [m.router_replay.layer_number for m in model.modules() if hasattr(m, "topk")] == [1, 2]


def test_classes_made_before_activation() -> None:
    assert interpreters.run(config_classes.made_before, bed=True) == [[True, True, False]] * 4 + [
        [True, False]
    ]


def test_deactivation_gives_the_classes_back() -> None:
    assert interpreters.run(config_classes.given_back, bed=True) == [
        ["TransformerConfig", "MLATransformerConfig", "Early", "Own"],
        [],
    ]


@pytest.fixture
def mindspeed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """MindSpeed (a stand-in) around the root's `__init__`; returns its arguments, to be filled."""
    arguments = argparse.Namespace()
    monkeypatch.setattr(arguments_basic, "get_full_args", lambda: arguments)
    wrapped = arguments_basic.transformer_config_init_wrapper(TransformerConfig.__init__)
    monkeypatch.setattr(TransformerConfig, "__init__", wrapped)
    return vars(arguments)


def test_mindspeed_rebuilding_the_class_of_every_config(mindspeed: dict[str, Any]) -> None:
    """Cases 3 and D2: a value must survive, and the class of a config is not what it was."""
    mindspeed["use_flash_attn"] = True

    config = TransformerConfig(**SIZES, enable_routing_replay=True)
    plain = TransformerConfig(**SIZES)

    assert type(config) is not TransformerConfig
    assert config.use_flash_attn is True
    assert replay_enabled(config)
    assert not replay_enabled(plain)


def test_mindspeed_with_the_flag_on_its_command_line(mindspeed: dict[str, Any]) -> None:
    mindspeed["enable_routing_replay"] = "false"

    off = TransformerConfig(**SIZES)
    on = TransformerConfig(**SIZES, enable_routing_replay=True)

    assert not replay_enabled(off)
    assert replay_enabled(on)


def test_what_an_own_init_or_post_init_makes_of_the_value_stays() -> None:
    assert interpreters.run(config_classes.decided_by_the_class, bed=True) == [
        True,
        False,
        True,
        True,
        False,
    ]


def test_classes_that_share_their_fields() -> None:
    """`slots=True` makes a second class, and the first lives on until it is collected."""
    assert interpreters.run(config_classes.with_slots, bed=True) is True
