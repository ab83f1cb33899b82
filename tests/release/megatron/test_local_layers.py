"""The routers of a model by walking it, and helpers that somebody has replaced."""

import functools
import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer import transformer_block, transformer_layer
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

from replay_patch import LayoutError, local_layers
from replay_patch.matrix import tiny
from replay_patch.megatron.routers import decoder_routers, routers


def gpt(**fields: Any) -> Any:
    return tiny.gpt_model(tiny.moe_config(**{"num_layers": 3} | fields))


def of_layers(block: Any) -> list[Any]:
    """The routers of a decoder, in order."""
    return [module for module in block.modules() if isinstance(module, TopKRouter)]


# --- walking a model --------------------------------------------------------------------------


@pytest.mark.parametrize("frequency, numbers", [(1, [1, 2, 3]), (2, [1, 3]), ([0, 0, 1], [3])])
def test_routers_by_layer_number(frequency: Any, numbers: list[int]) -> None:
    model = gpt(moe_layer_freq=frequency)

    assert dict(zip(numbers, of_layers(model.decoder), strict=True)) == decoder_routers(model)
    assert tuple(numbers) == local_layers(model.config, pp_rank=0) == local_layers(model.config)


def test_wrapped_models() -> None:
    config = tiny.moe_config(num_layers=2, bf16=True, params_dtype=torch.bfloat16)
    model = tiny.gpt_model(config)
    half = Float16Module(config, model)
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(), half)

    assert decoder_routers(model) == decoder_routers(half) == decoder_routers(wrapped)
    assert list(decoder_routers(wrapped)) == [1, 2]


def test_a_decoder_that_was_built_twice_is_found_where_it_is() -> None:  # 14
    model, other = gpt(), gpt()
    replaced = of_layers(model.decoder)

    model.decoder = other.decoder

    assert list(decoder_routers(model).values()) == of_layers(other.decoder)
    assert not {id(r) for r in replaced} & {id(r) for r in decoder_routers(model).values()}


def test_routers_of_mtp_blocks_are_told_by_their_place() -> None:  # 29
    model = gpt(num_layers=2, mtp_num_layers=2)

    found = routers(model)

    assert [key for key in found if not key[1]] == [(1, 0), (2, 0)]
    assert [depth for _, depth in found if depth] == [1, 2]
    for (_, depth), router in found.items():
        if depth:
            assert of_layers(model.mtp.layers[depth - 1]) == [router]
    assert list(decoder_routers(model).values()) == of_layers(model.decoder)


class Wrapper(torch.nn.Module):
    """Something that holds a model under a name of its own."""

    def __init__(self, **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def test_only_the_language_model_of_several_counts() -> None:
    language, vision = gpt(), gpt()

    model = Wrapper(module=Wrapper(vision_model=vision, language_model=language))

    assert decoder_routers(model) == decoder_routers(language)
    assert decoder_routers(Wrapper(language_model=gpt(num_moe_experts=None), v=vision)) == {}


def test_two_decoders_are_refused_by_their_paths() -> None:
    model = Wrapper(encoder=gpt(), decoder=gpt())

    with pytest.raises(LayoutError) as error:
        routers(model)

    for part in ("encoder", "decoder"):
        assert f"{part}.decoder.layers.0.mlp.router" in str(error.value)
    assert "layer 1" in str(error.value)


def test_a_router_that_is_reached_twice_is_one() -> None:
    model = gpt()

    assert decoder_routers(Wrapper(a=model, b=model)) == decoder_routers(model)


def test_a_router_without_a_number_is_refused() -> None:
    model = gpt()
    of_layers(model)[1].layer_number = None

    with pytest.raises(LayoutError, match=r"decoder\.layers\.1\.mlp\.router .* layer_number None"):
        routers(model)


def test_nothing_keeps_a_router_alive() -> None:
    model = gpt()
    refs = [weakref.ref(router) for router in decoder_routers(model).values()]

    del model
    gc.collect()

    assert [ref() for ref in refs] == [None] * 3


# --- the stage in question ----------------------------------------------------------------------


def test_process_groups_of_another_size_do_not_say_the_rank() -> None:
    config = tiny.moe_config(num_layers=4, pipeline_model_parallel_size=2)

    assert local_layers(config, pp_rank=1) == (3, 4)
    with pytest.raises(LayoutError, match=r"parallel_state has none of 2.*pp_rank="):
        local_layers(config)


# --- helpers that somebody has replaced ---------------------------------------------------------

OFFSET, COUNT = "get_transformer_layer_offset", "get_num_layers_to_build"


def replace(monkeypatch: pytest.MonkeyPatch, offset: Any = None, count: Any = None) -> None:
    if offset:
        monkeypatch.setattr(transformer_layer, OFFSET, offset)
    if count:
        monkeypatch.setattr(transformer_block, COUNT, count)


def virtual_config() -> Any:
    return tiny.moe_config(
        num_layers=8,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        moe_layer_freq=[0, 0, 1, 1, 1, 1, 1, 1],
        **tiny.VPP_P2P,
    )


def by_stage(config: Any) -> list[list[tuple[int, ...]]]:
    return [
        [local_layers(config, pp_rank=rank, vp_stage=stage) for stage in range(2)]
        for rank in range(2)
    ]


RIGHT = [[(), (5, 6)], [(3, 4), (7, 8)]]  # 17


def test_the_installed_helpers_are_asked_and_agree() -> None:
    assert by_stage(virtual_config()) == RIGHT


@pytest.mark.parametrize(
    "offset, count",
    [
        (lambda config: 0, None),
        (None, lambda config: 2),
        (lambda config: 0, lambda config: 2),
        (lambda config, vp_stage=None: 0, None),
    ],
)
def test_helpers_that_cannot_be_asked_about_the_stage(  # 7, 8
    monkeypatch: pytest.MonkeyPatch, offset: Any, count: Any
) -> None:
    replace(monkeypatch, offset, count)

    assert by_stage(virtual_config()) == RIGHT


def test_a_placement_that_only_the_helpers_know(monkeypatch: pytest.MonkeyPatch) -> None:
    replace(
        monkeypatch,
        lambda config, vp_stage=None, pp_rank=None: [0, 1][pp_rank],
        lambda config, vp_stage=None, pp_rank=None: [1, 3][pp_rank],
    )
    config = tiny.moe_config(num_layers=4, pipeline_model_parallel_size=2)

    assert [local_layers(config, pp_rank=rank) for rank in range(2)] == [(1,), (2, 3, 4)]


def test_helpers_that_make_no_whole_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    replace(monkeypatch, lambda config, vp_stage=None, pp_rank=None: 0)
    config = tiny.moe_config(num_layers=4, pipeline_model_parallel_size=2)

    assert local_layers(config, pp_rank=0) == (1, 2)
    with pytest.raises(LayoutError, match=r"say \(offset, layers\) = \(0, 2\).*means \(2, 2\)"):
        local_layers(config, pp_rank=1)


@pytest.mark.parametrize("wraps", [False, True])
def test_a_helper_that_contradicts_the_config_on_this_rank_is_refused(
    monkeypatch: pytest.MonkeyPatch, wraps: bool
) -> None:
    """One that says it wraps the original does not take what that takes."""

    def wrong(config: Any) -> int:
        return 1

    original = getattr(transformer_layer, OFFSET)
    replace(monkeypatch, functools.wraps(original)(wrong) if wraps else wrong)

    with pytest.raises(LayoutError, match=r"say \(offset, layers\) = \(1, 2\).*means \(0, 2\)"):
        local_layers(tiny.moe_config(num_layers=2))


def test_a_layout_is_read_and_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:  # 23
    replace(monkeypatch, lambda *args, **kwargs: 99, lambda *args, **kwargs: 99)
    stages = [[["decoder"]], [["decoder", "decoder"]]]
    layout = SimpleNamespace(
        layout=[[[SimpleNamespace(name=kind) for kind in s] for s in rank] for rank in stages]
    )
    config = tiny.moe_config(num_layers=3, pipeline_model_parallel_size=1)
    config.pipeline_model_parallel_size = 2
    config.pipeline_model_parallel_layout = layout

    assert [local_layers(config, pp_rank=rank) for rank in range(2)] == [(1,), (2, 3)]


def test_a_layout_that_is_set_late_as_text_is_parsed() -> None:
    if not hasattr(TransformerConfig, "pipeline_model_parallel_layout"):
        pytest.skip("this release has no layout")
    config = tiny.moe_config(num_layers=3, pipeline_model_parallel_size=1)
    config.pipeline_model_parallel_size = 2
    config.pipeline_model_parallel_layout = "Et|ttL"

    assert [local_layers(config, pp_rank=rank) for rank in range(2)] == [(1,), (2, 3)]
