"""Megatron-Bridge 0.3.1 as it is released, on each Megatron it can be imported with.

Transformer Engine is the stand-in of tests/standins/te. One process per release answers everything;
the questions are in helpers/bridge_questions.py, bridge_configs.py and bridge_models.py.
"""

import functools
from typing import Any

import pytest
from helpers import trainers
from helpers.bridge_answers import BOTH, REPLAYED, WRAPPED

BRIDGE = {"megatron-bridge": "0.3.1"}
RUNS = ("0.16.0", "0.16.1")
"""Of the releases that it asks for (0.15 up to 0.17)."""

CANNOT = {
    "0.14.0": "ImportError: cannot import name 'ProcessGroupCollection' from "
    "'megatron.core.process_groups_config'",
    "0.15.0": "ModuleNotFoundError: No module named "
    "'megatron.core.models.gpt.experimental_attention_variant_module_specs'",
    "0.15.3": "ModuleNotFoundError: No module named "
    "'megatron.core.models.gpt.experimental_attention_variant_module_specs'",
}
"""Release -> what `import megatron.bridge` raises there, plugin or not."""

BEYOND = {
    "0.17.1": {
        "distributed": "AttributeError: encoder_and_decoder",
        "training": "ModuleNotFoundError: No module named "
        "'megatron.core.datasets.megatron_tokenizer'",
    },
}
"""Later than it asks for: what `provide_distributed_model` and `megatron.bridge.training.config`
raise there. `provide` runs."""

UNFINISHED = {
    "HeterogeneousTransformerConfig",
    "LlamaNemotronHeterogeneousProvider",
    "Llama31NemotronUltra253BProvider",
    "Llama33NemotronSuper49BProvider",
}
"""They have no asdict before `finalize()`, plugin or not: it wants `per_block_parameters`."""

PROGRAM = "programs.trainers.megatron_bridge"
IMPORT = """
import json; from helpers import bridge_questions
print(json.dumps(bridge_questions.error(lambda: __import__("megatron.bridge"))))
"""

ALL_REPLAYED = {
    "enable_routing_replay": REPLAYED,
    "moe_enable_routing_replay": REPLAYED,
    "deepseek": REPLAYED,
    "lora": REPLAYED,
    "wrapped": REPLAYED | WRAPPED,
}
SAVED = dict.fromkeys(["strict", "lenient", "yaml", "overrides"], [True] * 3)
SAVED |= {"without": [False] * 3}
TWICE = {"routers": 2, "listed": BOTH, "replayed": BOTH}


@functools.cache
def ask(megatron: str, questions: str, plugin: bool = True) -> Any:
    return trainers.run(
        PROGRAM, megatron, BRIDGE, questions, plugin=plugin, transformer_engine=True
    )


@pytest.fixture(params=RUNS)
def answers(request: pytest.FixtureRequest) -> Any:
    return ask(request.param, "with_plugin")


def assert_none_lacks_a_field(answer: Any) -> None:
    count, lacking = answer

    assert count > 100
    assert set(lacking) == UNFINISHED
    for lost in lacking.values():
        assert set(lost) == {"asdict", "bridge's asdict"}
        assert all(how.endswith("no attribute 'per_block_parameters'") for how in lost.values())


def test_without_the_plugin_the_flag_is_unknown_or_silently_ignored() -> None:
    found = ask("0.16.1", "without_plugin", plugin=False)

    assert found["constructor"].startswith("TypeError: ")
    assert "unexpected keyword argument 'enable_routing_replay'" in found["constructor"]
    assert found["override"].startswith("OverridesError: ")
    assert found["routers_without_replay"] == BOTH


def test_without_the_plugin_ids_land_on_the_decoder_that_was_thrown_away() -> None:
    """And nothing is raised: the model routes natively."""
    found = ask("0.16.1", "without_plugin", plugin=False)["twice"]

    assert found == {
        "routers": 2,
        "listed": [False, False, True, True],
        "replayed": [False, False],
    }


def test_every_config_class_has_the_fields(answers: Any) -> None:
    assert_none_lacks_a_field(answers["lacking"])
    assert answers["failed"] == []


def test_its_files_and_overrides_carry_the_fields(answers: Any) -> None:
    """YAML with the names and without them, strictly and leniently read; Hydra's overrides."""
    assert answers["saved"] == SAVED


def test_provided_models_replay_by_either_name_and_as_they_are_wrapped(answers: Any) -> None:
    assert answers["replayed"] == ALL_REPLAYED


def test_lora_on_routers_is_its_own_error(answers: Any) -> None:
    """Its wrapper takes no padding mask, which each Megatron that it imports with gives."""
    error = "TypeError: LoRATopKRouter.forward() takes 2 positional arguments but 3 were given"
    without = ask("0.16.1", "without_plugin", plugin=False)

    assert [answers["lora_on_the_router"], without["lora_on_the_router"]] == [error] * 2


def test_forwards_and_recomputes_replay(answers: Any) -> None:
    assert answers["recompute"] == [True] * 5


def test_a_decoder_that_is_built_twice_replays_in_the_routers_that_run(answers: Any) -> None:
    """Qwen3-VL. The thrown-away routers have left the list without a garbage collection."""
    assert answers["twice"] == TWICE
    assert answers["twice_by_session"] == {
        key: REPLAYED[key] for key in ("changed", "in sessions", "report")
    } | {"wrapped in": ["Qwen3VLModel"]}


def test_classes_that_were_there_before_the_plugin_have_the_fields() -> None:
    found = ask("0.16.1", "without_plugin", plugin=False)["late"]
    lacking, *others = found

    assert_none_lacks_a_field(lacking)
    assert others == [SAVED, ALL_REPLAYED, TWICE]


@pytest.mark.parametrize("megatron", CANNOT)
def test_releases_that_it_cannot_be_imported_with(megatron: str) -> None:
    """Neither with the plugin; it asks for 0.15 itself."""
    error = trainers.run(IMPORT, megatron, BRIDGE, transformer_engine=True)

    assert error.startswith(CANNOT[megatron])


@pytest.mark.parametrize("megatron", BEYOND)
def test_releases_beyond_its_pin_provide_a_model_but_do_not_wrap_it(megatron: str) -> None:
    found = ask(megatron, "beyond_its_pin")

    assert {name: found[name] for name in BEYOND[megatron]} == BEYOND[megatron]
    assert_none_lacks_a_field(found["lacking"])
    assert found["alone"] == REPLAYED
