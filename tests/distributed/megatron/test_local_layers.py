"""local_layers() against the layer numbers of really built models, on ranks of their own."""

import dataclasses
import functools
import inspect
import itertools
from typing import Any

import megatron.core
import pytest
from megatron.core import parallel_state
from megatron.core.transformer import transformer_block, transformer_layer
from megatron.core.transformer.transformer_config import TransformerConfig

import replay_patch
from replay_patch import LayoutError, local_layers
from replay_patch.matrix import tiny
from replay_patch.megatron.layer_placement import moe_layers
from replay_patch.megatron.routers import decoder_routers, routers

Stage = tuple[int, int | None]

FIELDS = {field.name for field in dataclasses.fields(TransformerConfig)}
E, T, M, L = "embedding", "decoder", "mtp", "loss"
FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
EMBEDDING = {"account_for_embedding_in_pipeline_split": True}
LOSS = {"account_for_loss_in_pipeline_split": True}
VPP = {"virtual_pipeline_model_parallel_size": 2, **tiny.VPP_P2P}

TWO_RANKS: dict[str, dict[str, Any]] = {
    "even": {"num_layers": 4},
    "even, virtual": {"num_layers": 4, **VPP},
    "short first": {"num_layers": 5, FIRST: 2},
    "short last": {"num_layers": 5, LAST: 1},
    "short first, virtual": {"num_layers": 6, FIRST: 2, **VPP},
    "short last, virtual": {"num_layers": 6, LAST: 2, **VPP},
    "embedding": {"num_layers": 3, **EMBEDDING},
    "loss": {"num_layers": 3, **LOSS},
    "embedding and loss, virtual": {"num_layers": 6, **EMBEDDING, **LOSS, **VPP},
    "every second": {"num_layers": 6, "moe_layer_freq": 2},
    "listed": {"num_layers": 4, "moe_layer_freq": [0, 1, 1, 0]},
    "dense in front, virtual": {  # case 17
        "num_layers": 8,
        "moe_layer_freq": [0, 0, 1, 1, 1, 1, 1, 1],
        **VPP,
    },
    "a stage without": {"num_layers": 4, "moe_layer_freq": [0, 0, 1, 1]},
    "dense and short last": {"num_layers": 5, LAST: 1, "moe_layer_freq": [0, 1, 1, 0, 1]},
    "mtp": {"num_layers": 2, "mtp_num_layers": 1},
    "mtp and dense": {"num_layers": 4, "mtp_num_layers": 2, "moe_layer_freq": [0, 1, 0, 1]},
    "layout": {"num_layers": 5, "pipeline_model_parallel_layout": [[E, T], [T, T, T, T, L]]},
    "layout, virtual": {
        "num_layers": 5,
        "pipeline_model_parallel_layout": [[E, T], [T, T], [T], [T, L]],
        "moe_layer_freq": [0, 1, 1, 1, 1],
        **VPP,
    },
    "layout, mtp": {
        "num_layers": 3,
        "mtp_num_layers": 1,
        "pipeline_model_parallel_layout": [[E, T, T], [T, M, L]],
    },
}
THREE_RANKS: dict[str, dict[str, Any]] = {
    "short first and last": {"num_layers": 4, FIRST: 1, LAST: 1},
    "short first and last, virtual": {"num_layers": 8, FIRST: 2, LAST: 2, **VPP},
    "short last, virtual": {"num_layers": 14, LAST: 2, **VPP},  # case 21
    "embedding and loss alone": {"num_layers": 1, **EMBEDDING, **LOSS},
    "layout": {  # case 23
        "num_layers": 5,
        "pipeline_model_parallel_layout": [[E, T], [T, T, T], [T, L]],
    },
}


def known(fields: dict[str, Any]) -> bool:
    """Whether this release has the fields, and MTP layers in a layout."""
    if not fields.keys() <= FIELDS:
        return False
    if not ("mtp_num_layers" in fields and "pipeline_model_parallel_layout" in fields):
        return True
    from megatron.core.transformer import pipeline_parallel_layer_layout as module

    check = module.PipelineParallelLayerLayout.validate_layer_layout
    return "mtp_num_layers" in inspect.signature(check).parameters


CASES = {
    world: [name for name, fields in cases.items() if known(fields)]
    for world, cases in ((2, TWO_RANKS), (3, THREE_RANKS))
}
EACH = [(world, name) for world, names in CASES.items() for name in names]


def make_config(world: int, name: str) -> Any:
    fields = {2: TWO_RANKS, 3: THREE_RANKS}[world][name]
    return tiny.moe_config(pipeline_model_parallel_size=world, **fields)


def all_stages(config: Any) -> list[Stage]:
    """In the order in which activations flow."""
    ranks = range(config.pipeline_model_parallel_size)
    virtual = config.virtual_pipeline_model_parallel_size
    return [(r, v) for v in (range(virtual) if virtual else [None]) for r in ranks]


def asked(config: Any) -> dict[Stage, tuple[int, ...]]:
    return {
        (rank, stage): local_layers(config, pp_rank=rank, vp_stage=stage)
        for rank, stage in all_stages(config)
    }


@dataclasses.dataclass(frozen=True)
class Rank:
    """What one rank has built, and what it knows."""

    layers: dict[Stage, list[int]]  # of all decoder layers of its chunks
    routers: dict[Stage, list[int]]
    mtp: list[tuple[int, int]]  # keys of routers
    own: dict[Stage, tuple[int, ...]]
    asked: dict[Stage, tuple[int, ...]]


def rank_main(rank: int, world: int, init_file: str) -> dict[str, Rank]:
    tiny.init(world, rank, init_file)
    return {name: build(rank, world, name) for name in CASES[world]}


def build(rank: int, world: int, name: str) -> Rank:
    config = make_config(world, name)
    virtual = config.virtual_pipeline_model_parallel_size
    sizes = {"pipeline_model_parallel_size": world}
    if virtual:
        sizes["virtual_pipeline_model_parallel_size"] = virtual
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(**sizes)
    stages = [stage for stage in all_stages(config) if stage[0] == rank]
    chunks = dict(zip(stages, tiny.model_chunks(config), strict=True))
    return Rank(
        {at: [layer.layer_number for layer in c.decoder.layers] for at, c in chunks.items()},
        {at: list(decoder_routers(c)) for at, c in chunks.items()},
        [key for c in chunks.values() for key in routers(c) if key[1]],
        {at: local_layers(config, vp_stage=at[1]) for at in stages},
        asked(config),
    )


@functools.cache
def built(world: int) -> list[dict[str, Rank]]:
    return tiny.launch(rank_main, world)


@pytest.mark.parametrize("world, name", EACH)
def test_every_rank_knows_what_every_stage_has_built(world: int, name: str) -> None:
    ranks = [of[name] for of in built(world)]

    routers = {at: tuple(n) for rank in ranks for at, n in rank.routers.items()}
    assert [rank.asked for rank in ranks] == [routers] * world
    assert {at: n for rank in ranks for at, n in rank.own.items()} == routers
    assert asked(make_config(world, name)) == routers  # and here there is no process group


@pytest.mark.parametrize("world, name", EACH)
def test_each_moe_layer_is_on_one_stage_in_the_order_of_the_model(world: int, name: str) -> None:
    config = make_config(world, name)

    def in_order(of_stage: dict[Stage, Any]) -> list[int]:
        return list(itertools.chain.from_iterable(of_stage[at] for at in all_stages(config)))

    layers = {at: n for of in built(world) for at, n in of[name].layers.items()}
    assert in_order(asked(config)) == list(moe_layers(config))
    assert in_order(layers) == list(range(1, config.num_layers + 1))


def test_routers_of_mtp_blocks_have_keys_of_their_own() -> None:  # 29
    first, last = (of["mtp and dense"] for of in built(2))

    assert first.mtp == []
    assert [depth for _, depth in last.mtp] == [1, 2]


# --- the overlapping offsets of 0.12 and 0.13, without the patch --------------------------------


def without_the_patch(rank: int, world: int, init_file: str) -> tuple[list[Any], Any]:
    """([layers of the models], local_layers of all stages)."""
    replay_patch.deactivate()
    tiny.init(world, rank, init_file)
    of = build(rank, world, "short last, virtual")
    return list(of.layers.values()), of.asked


def test_the_map_is_right_where_the_helpers_are_not() -> None:  # 21
    ranks = tiny.launch(without_the_patch, 3)

    layers = [n for stages, _ in ranks for stage in stages for n in stage]
    right = {(0, 0): (1, 2, 3), (1, 0): (4, 5, 6), (2, 0): (7,)}
    right |= {(0, 1): (8, 9, 10), (1, 1): (11, 12, 13), (2, 1): (14,)}
    assert [known for _, known in ranks] == [right] * 3
    overlap = len(set(layers)) < 14  # then the models differ from the map, and cannot be replayed
    assert overlap == megatron.core.__version__.startswith(("0.12.", "0.13."))


# --- helpers replaced at run time ---------------------------------------------------------------


def replaced(rank: int, world: int, init_file: str) -> tuple[Any, str, Any]:
    """(all stages asked; the error for this stage, if any; the stages asked after a mistake)."""
    tiny.init(world, rank, init_file, pipeline_model_parallel_size=world)
    config = tiny.moe_config(pipeline_model_parallel_size=world, num_layers=5, **{FIRST: 2})
    offset = transformer_layer.get_transformer_layer_offset
    count = transformer_block.get_num_layers_to_build
    transformer_layer.get_transformer_layer_offset = lambda config: offset(config)
    transformer_block.get_num_layers_to_build = lambda config: count(config)
    good = asked(config)
    transformer_layer.get_transformer_layer_offset = lambda config: 0
    others = {at: local_layers(config, pp_rank=at[0]) for at in all_stages(config) if at[0] != rank}
    try:
        return good, str(local_layers(config)), others
    except LayoutError as error:
        return good, str(error), others


def test_helpers_that_take_the_config_only() -> None:  # 8
    right = {(0, None): (1, 2), (1, None): (3, 4, 5)}

    first, second = tiny.launch(replaced, 2)

    assert first[0] == second[0] == right
    assert first[1] == "(1, 2)"  # it says so, too
    assert "(offset, layers) = (0, 3), and the config means (2, 3)" in second[1]
    assert first[2] == {(1, None): (3, 4, 5)}
    assert second[2] == {(0, None): (1, 2)}
