"""Which layers a stage holds, by the config alone: no Megatron, no process group, no model."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay_patch import LayoutError, local_layers
from replay_patch.megatron.layer_placement import moe_layers


def make(pp: int = 1, vp: int | None = None, **fields: Any) -> Any:
    return SimpleNamespace(
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vp,
        **{"num_moe_experts": 4} | fields,
    )


def by_stage(config: Any) -> list[list[tuple[int, ...]]]:
    """[pp_rank][vp_stage]."""
    virtual = config.virtual_pipeline_model_parallel_size
    return [
        [local_layers(config, pp_rank=rank, vp_stage=stage) for stage in range(virtual or 1)]
        for rank in range(config.pipeline_model_parallel_size)
    ]


def layout(*ranks: str) -> Any:
    """Stages as they are written for the command line: E, t, m, L; virtual ones apart by |."""
    kinds = {"E": "embedding", "t": "decoder", "m": "mtp", "L": "loss"}
    return SimpleNamespace(
        layout=[
            [[SimpleNamespace(name=kinds[kind]) for kind in stage] for stage in rank.split("|")]
            for rank in ranks
        ]
    )


# --- known cases ------------------------------------------------------------------------------


def test_dense_layers_are_not_counted_into_virtual_stages() -> None:  # 17, from 0 there
    config = make(2, 2, num_layers=8, moe_layer_freq=[0, 0, 1, 1, 1, 1, 1, 1])

    assert by_stage(config) == [[(), (5, 6)], [(3, 4), (7, 8)]]


def test_virtual_stages_with_only_the_last_rank_given() -> None:  # 21
    config = make(3, 2, num_layers=14, num_layers_in_last_pipeline_stage=2)

    assert by_stage(config) == [
        [(1, 2, 3), (8, 9, 10)],
        [(4, 5, 6), (11, 12, 13)],
        [(7,), (14,)],
    ]


def test_a_layout_is_read_for_the_rank_in_question() -> None:  # 23
    config = make(3, num_layers=5, pipeline_model_parallel_layout=layout("Et", "ttt", "tL"))

    assert by_stage(config) == [[(1,)], [(2, 3, 4)], [(5,)]]


def test_a_layout_with_virtual_stages_and_mtp() -> None:
    config = make(2, 2, num_layers=5, pipeline_model_parallel_layout=layout("E|tt", "tt|tmL"))

    assert by_stage(config) == [[(), (3, 4)], [(1, 2), (5,)]]


def test_embedding_and_loss_take_the_place_of_a_layer() -> None:
    both = {
        "account_for_embedding_in_pipeline_split": True,
        "account_for_loss_in_pipeline_split": True,
    }

    assert by_stage(make(3, num_layers=4, **both)) == [[(1,)], [(2, 3)], [(4,)]]
    assert by_stage(make(3, num_layers=1, **both)) == [[()], [(1,)], [()]]
    assert by_stage(make(2, 2, num_layers=6, **both)) == [[(1,), (4, 5)], [(2, 3), (6,)]]


@pytest.mark.parametrize(
    "frequency, expected",
    [
        (1, (1, 2, 3, 4, 5)),
        (2, (1, 3, 5)),
        (3, (1, 4)),
        (9, (1,)),
        ([0, 1, 1, 0, 1], (2, 3, 5)),  # 16
        ((0, 0, 0, 0, 1), (5,)),
        ([0] * 5, ()),
        (None, (1, 2, 3, 4, 5)),  # D10
    ],
)
def test_the_frequency_of_moe_layers(frequency: Any, expected: tuple[int, ...]) -> None:
    assert local_layers(make(num_layers=5, moe_layer_freq=frequency), pp_rank=0) == expected


def test_a_config_without_the_frequency_has_moe_layers_only() -> None:  # D10
    assert local_layers(make(num_layers=2), pp_rank=0) == (1, 2)


def test_a_dense_model_has_none() -> None:
    assert local_layers(make(num_layers=2, num_moe_experts=None), pp_rank=0) == ()
    assert local_layers(make(num_layers=2, moe_layer_freq=[0, 0]), pp_rank=0) == ()


def test_mindspeeds_unaligned_pipeline() -> None:
    assert by_stage(make(2, num_layers=4, pipeline_num_transformer_layers=[[3], [1]])) == [
        [(1, 2, 3)],
        [(4,)],
    ]
    config = make(2, 2, num_layers=4, pipeline_num_transformer_layers="[[0,1],[2,1]]")
    assert by_stage(config) == [[(), (3,)], [(1, 2), (4,)]]


def test_mindspeeds_layers_without_a_router() -> None:
    config = make(num_layers=4, noop_layers={0, 3}, first_k_dense_replace=2)

    assert local_layers(config, pp_rank=0) == (3,)


# --- every MoE layer is on one stage, in order ------------------------------------------------


@st.composite
def configs(draw: Any) -> Any:
    pp = draw(st.integers(1, 4))
    vp = draw(st.sampled_from([None, 1, 2, 3])) if pp > 1 else None
    each = draw(st.integers(1, 3)) * (vp or 1)
    fields: dict[str, Any] = {}
    kind = draw(st.sampled_from(["even", "uneven", "accounted", "layout"]))
    layers = pp * each
    if kind == "uneven" and pp > 1:
        given = draw(st.sampled_from(["first", "last", "first last"])).split()
        for end in given:
            count = draw(st.integers(1, 3)) * (vp or 1)
            fields[f"num_layers_in_{end}_pipeline_stage"] = count
            layers += count - each
    elif kind == "accounted" and each > 1:
        for end in ("embedding", "loss"):
            fields[f"account_for_{end}_in_pipeline_split"] = draw(st.booleans())
        layers -= sum(fields.values())
    elif kind == "layout":
        stage = st.integers(0, 3).map("t".__mul__)
        ranks = [draw(st.lists(stage, min_size=vp or 1, max_size=vp or 1)) for _ in range(pp)]
        layers = sum(len(stage) for rank in ranks for stage in rank)
        ranks[0][0] = "E" + ranks[0][0]
        ranks[-1][-1] += "mL"
        fields["pipeline_model_parallel_layout"] = layout(*map("|".join, ranks))
    frequencies = st.lists(st.integers(0, 1), min_size=layers, max_size=layers)
    fields["moe_layer_freq"] = draw(st.one_of(st.none(), st.integers(1, 4), frequencies))
    return make(pp, vp, num_layers=layers, **fields)


@settings(max_examples=300, deadline=None)
@given(configs())
def test_each_moe_layer_is_on_one_stage_in_the_order_of_the_model(config: Any) -> None:
    stages = by_stage(config)

    virtual = config.virtual_pipeline_model_parallel_size or 1
    in_order = [n for stage in range(virtual) for rank in stages for n in rank[stage]]
    assert in_order == list(moe_layers(config))


# --- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config, message",
    [
        (make(2, num_layers=5), "5 does not divide by 2"),
        (make(2, 2, num_layers=6), "6 does not divide by 4"),
        (make(3, num_layers=6, num_layers_in_first_pipeline_stage=1), "5 does not divide by 2"),
        (make(2, 2, num_layers=5, num_layers_in_first_pipeline_stage=1), "does not divide by 2"),
        (
            make(
                2,
                num_layers=5,
                num_layers_in_first_pipeline_stage=1,
                num_layers_in_last_pipeline_stage=1,
            ),
            "puts 2 layers .*num_layers=5",
        ),
        (make(2, num_layers=1, num_layers_in_first_pipeline_stage=2), "none below 0"),
        (
            make(2, num_layers=3, pipeline_model_parallel_layout=layout("Et", "t", "tL")),
            "3 stages|of them",
        ),
        (make(2, num_layers=9, pipeline_model_parallel_layout=layout("Et", "tL")), "num_layers=9"),
        (make(2, num_layers=2, pipeline_num_transformer_layers="two"), "list of lists"),
        (make(2, num_layers=2, schedules_method="dualpipev"), "dualpipev"),
        (make(2, num_layers=2, is_hybrid_model=True), "is_hybrid_model"),
        (make(1, 2, num_layers=2), "2 virtual stages on one pipeline rank"),
        (make(2, num_layers=2, moe_layer_freq=[1]), r"moe_layer_freq=\[1\].*num_layers=2"),
        (make(2, num_layers=2, moe_layer_freq=0), "moe_layer_freq=0"),
        (make(2, num_layers=2, moe_layer_freq="1"), "moe_layer_freq='1'"),
    ],
)
def test_a_config_that_does_not_tell_is_refused(config: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        local_layers(config, pp_rank=0, vp_stage=0)


@pytest.mark.parametrize(
    "where, message",
    [
        ({}, r"asks for this process's pipeline rank.*initialize_model_parallel.*pp_rank="),
        ({"vp_stage": 0}, "asks for this process's pipeline rank"),
        ({"pp_rank": 0}, "holds 2 virtual stages: say which"),
        ({"pp_rank": 2, "vp_stage": 0}, "there is no stage pp_rank=2"),
        ({"pp_rank": -1, "vp_stage": 0}, "there is no stage pp_rank=-1"),
        ({"pp_rank": 0, "vp_stage": 2}, "there is no stage .*vp_stage=2"),
    ],
)
def test_a_stage_that_is_not_said_or_does_not_exist(where: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        local_layers(make(2, 2, num_layers=8), **where)


def test_without_virtual_stages_the_first_may_be_said() -> None:
    assert local_layers(make(2, num_layers=4), pp_rank=1, vp_stage=0) == (3, 4)
    assert local_layers(make(2, 1, num_layers=4), pp_rank=1) == (3, 4)
    with pytest.raises(LayoutError, match="vp_stage=1"):
        local_layers(make(2, num_layers=4), pp_rank=1, vp_stage=1)
