"""mbridge 0.15.1 as it is released, as verl uses it, on Megatron-core 0.12 to 0.19.

Transformer Engine is the stand-in of tests/standins/te. One process per release answers everything.
"""

import functools
from typing import Any

import pytest
from helpers import trainers
from helpers.bridge_answers import BOTH, REPLAYED, WRAPPED

MBRIDGE = {"mbridge": "0.15.1"}
RUNS = ("0.12.1", "0.14.0", "0.16.1")
LATER = "0.19.2"
"""Here its `get_model` ends in an error of its own; the model that it gives is built without it."""


@functools.cache
def ask(megatron: str, questions: str, plugin: bool = True) -> Any:
    program = "programs.trainers.mbridge"
    return trainers.run(
        program, megatron, MBRIDGE, questions, plugin=plugin, transformer_engine=True
    )


@pytest.mark.parametrize("megatron", ["0.12.1", "0.16.1"])
def test_without_the_plugin_the_flag_is_unknown_or_silently_ignored(megatron: str) -> None:
    found = ask(megatron, "without_plugin", plugin=False)

    assert found["argument"].startswith("TypeError: ")
    assert "unexpected keyword argument 'enable_routing_replay'" in found["argument"]
    assert found["attribute"] == BOTH


@pytest.mark.parametrize("megatron", [*RUNS, LATER])
def test_extra_args_carry_the_fields(megatron: str) -> None:
    found = ask(megatron, "later" if megatron == LATER else "with_plugin")["fields"]

    assert found == {"given": [True] * 3, "again": [True] * 3, "default": [False] * 3}


@pytest.mark.parametrize("megatron", [*RUNS, LATER])
@pytest.mark.parametrize("way", ["argument", "native_name", "attribute"])
def test_its_models_replay_however_the_flag_is_set(megatron: str, way: str) -> None:
    assert ask(megatron, "later" if megatron == LATER else "with_plugin")[way] == REPLAYED


@pytest.mark.parametrize("megatron", RUNS)
def test_a_model_in_its_wrappers_replays(megatron: str) -> None:
    assert ask(megatron, "with_plugin")["wrapped"] == REPLAYED | WRAPPED


def test_what_cannot_run_and_why() -> None:
    """Each is the same without the plugin."""
    found = ask("0.16.1", "with_plugin")

    # With transformers 5, unless the config has it as it had with 4.
    error = "AttributeError: 'Qwen3MoeConfig' object has no attribute 'rope_theta'"
    assert found["rope_theta"] == error
    # Decoders built twice are only in later, unreleased code.
    assert found["vl"].startswith("ValueError: Unregistered model type: qwen3_vl_moe")
    assert ask(LATER, "later")["get_model"] == "AttributeError: encoder_and_decoder"
