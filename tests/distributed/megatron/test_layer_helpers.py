"""Which layers a stage holds, asked on one rank about another, as that rank answers for itself."""

import dataclasses
import inspect
from typing import Any

import pytest
from helpers import interpreters
from megatron.core import parallel_state
from megatron.core.transformer import transformer_block, transformer_layer
from megatron.core.transformer.transformer_config import TransformerConfig
from programs.megatron import layer_helpers

import replay_patch
from replay_patch.matrix import tiny

PATCHED = {p.name: p.state for p in replay_patch.status().patches}["layer_helpers"] == "active"
FIELDS = {field.name for field in dataclasses.fields(TransformerConfig)}

E, T, L = "embedding", "decoder", "loss"
CONFIGS: dict[str, dict[str, Any]] = {
    "even": {"num_layers": 4},
    "virtual stages": {"num_layers": 8, "virtual_pipeline_model_parallel_size": 2},
    "short first": {"num_layers": 5, "num_layers_in_first_pipeline_stage": 2},
    "short first, virtual": {
        "num_layers": 6,
        "num_layers_in_first_pipeline_stage": 2,
        "virtual_pipeline_model_parallel_size": 2,
    },
    "embedding and loss": {
        "num_layers": 6,
        "account_for_embedding_in_pipeline_split": True,
        "account_for_loss_in_pipeline_split": True,
    },
    "embedding, virtual": {
        "num_layers": 7,
        "account_for_embedding_in_pipeline_split": True,
        "virtual_pipeline_model_parallel_size": 2,
    },
    "layout": {"num_layers": 5, "pipeline_model_parallel_layout": [[E, T], [T, T, T, T, L]]},
    "layout, virtual": {
        "num_layers": 6,
        "pipeline_model_parallel_layout": [[E, T], [T, T], [T], [T, T, L]],
        "virtual_pipeline_model_parallel_size": 2,
    },
}
HERE = {
    name: config for name, config in CONFIGS.items() if not any("layout" in k for k in config)
} | {
    name: config
    for name, config in CONFIGS.items()
    if "pipeline_model_parallel_layout" in config and "pipeline_model_parallel_layout" in FIELDS
}


def make_config(name: str) -> Any:
    virtual = tiny.VPP_P2P if "virtual" in name else {}
    return tiny.moe_config(pipeline_model_parallel_size=2, **HERE[name], **virtual)


def stages(config: Any) -> list[tuple[int, int | None]]:
    virtual = config.virtual_pipeline_model_parallel_size
    return [(rank, v) for rank in range(2) for v in (range(virtual) if virtual else [None])]


def ask(config: Any, rank: int, vp_stage: int | None) -> tuple[int, int]:
    """(offset, number of layers), asked with the arguments of 0.15."""
    where = {"vp_stage": vp_stage, "pp_rank": rank}
    return (
        transformer_layer.get_transformer_layer_offset(config, **where),
        transformer_block.get_num_layers_to_build(config, **where),
    )


def answers(rank: int, world: int, init_file: str, name: str) -> dict[str, Any]:
    """What this rank says of itself by the release's own functions, and of all when asked."""
    config = make_config(name)
    virtual = config.virtual_pipeline_model_parallel_size
    sizes = {"pipeline_model_parallel_size": 2}
    if virtual:
        sizes["virtual_pipeline_model_parallel_size"] = virtual
    tiny.init(world, rank, init_file, **sizes)
    own = {}
    for of, vp_stage in stages(config):
        if of == rank:
            parallel_state.set_virtual_pipeline_model_parallel_rank(vp_stage)
            own[of, vp_stage] = tuple(
                native(helper, config, vp_stage)
                for helper in (
                    transformer_layer.get_transformer_layer_offset,
                    transformer_block.get_num_layers_to_build,
                )
            )
    return {"own": own, "asked": {stage: ask(config, *stage) for stage in stages(config)}}


def native(helper: Any, config: Any, vp_stage: int | None) -> int:
    original = inspect.unwrap(helper)
    takes = "vp_stage" in inspect.signature(original).parameters
    return int(original(config, vp_stage) if takes else original(config))


@pytest.mark.parametrize("name", HERE)
def test_a_rank_knows_of_another_what_that_rank_knows_of_itself(name: str) -> None:
    ranks = tiny.launch(answers, 2, (name,))

    truth = ranks[0]["own"] | ranks[1]["own"]
    assert [rank["asked"] for rank in ranks] == [truth, truth]
    layers = [n for offset, count in truth.values() for n in range(offset, offset + count)]
    assert sorted(layers) == list(range(make_config(name).num_layers))


@pytest.mark.skipif(not PATCHED, reason="this release's helpers take both arguments")
@pytest.mark.parametrize("name", HERE)
def test_no_process_group_is_needed(name: str) -> None:
    config = make_config(name)

    (rank,) = tiny.launch(answers, 2, (name,))[:1]

    assert {stage: ask(config, *stage) for stage in stages(config)} == rank["asked"]


@pytest.mark.skipif(not PATCHED, reason="this release's helpers take both arguments")
def test_without_the_new_arguments_it_is_the_original() -> None:
    config = tiny.moe_config(pipeline_model_parallel_size=1)

    for helper in (
        transformer_layer.get_transformer_layer_offset,
        transformer_block.get_num_layers_to_build,
    ):
        assert {"vp_stage", "pp_rank"} <= inspect.signature(helper).parameters.keys()
        assert helper is not inspect.unwrap(helper)
    assert transformer_layer.get_transformer_layer_offset(config, pp_rank=0) == 0


def test_every_module_that_imported_a_helper_has_the_same_one() -> None:
    found = {
        name: {id(vars(m)[name]) for m in (transformer_layer, transformer_block) if name in vars(m)}
        for name in ("get_transformer_layer_offset", "get_num_layers_to_build")
    }

    assert {name: len(ids) for name, ids in found.items()} == dict.fromkeys(found, 1)


def test_a_helper_that_somebody_wrapped_before_answers_for_the_stage_too() -> None:
    assert interpreters.run(layer_helpers.wrapped_before, bed=True) == [[0, 2], [2, 3]]
