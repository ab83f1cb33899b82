"""One trajectory's routes: what is accepted, what it becomes, what is refused."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replay_patch import RouteError, Routes

E, K = 6, 2


def rows(*tokens: list[list[int]]) -> torch.Tensor:
    return torch.tensor(tokens)


ONE = [[0, 1], [5, 2]]  # a token in two layers


def test_the_fields() -> None:
    routes = Routes(rows(ONE, ONE, ONE), E, start=4)

    assert (routes.num_tokens, routes.num_layers, routes.topk) == (3, 2, 2)
    assert (routes.num_experts, routes.start, routes.layers) == (6, 4, "moe")
    assert routes.expert_ids.tolist() == [ONE, ONE, ONE]
    assert routes.captured.tolist() == [True, True, True]


@pytest.mark.parametrize(
    "num_experts, dtype",
    [
        (2, torch.uint8),
        (256, torch.uint8),
        (257, torch.int16),
        (32768, torch.int16),
        (32769, torch.int32),
    ],
)
def test_the_dtype_follows_from_the_number_of_experts(num_experts: int, dtype: Any) -> None:  # 76
    routes = Routes([[[0, 1]], [[0, num_experts - 1]]], num_experts)

    assert routes.expert_ids.dtype is dtype
    assert routes.expert_ids[1, 0, 1] == num_experts - 1


FORMS = [
    lambda ids: ids,
    np.asarray,
    lambda ids: np.asarray(ids, np.uint8),
    lambda ids: np.asarray(ids, np.uint16),
    lambda ids: np.asarray(ids, np.uint64),
    lambda ids: np.asarray(ids, ">i4"),
    lambda ids: np.asarray(ids)[::-1][::-1],
    lambda ids: np.frombuffer(np.asarray(ids, np.int16).tobytes(), np.int16).reshape(-1, 2, 2),
    torch.tensor,
    lambda ids: torch.tensor(ids, dtype=torch.int8),
    lambda ids: torch.tensor(ids, dtype=torch.int32).transpose(0, 1).contiguous().transpose(0, 1),
    lambda ids: torch.from_numpy(np.asarray(ids, np.uint16)),
]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_integers(form: Any) -> None:  # 84
    routes = Routes(form([ONE, [[3, 4], [1, 0]]]), E)

    assert routes.expert_ids.tolist() == [ONE, [[3, 4], [1, 0]]]
    assert routes.expert_ids.dtype is torch.uint8
    assert routes.expert_ids.is_contiguous()


@pytest.mark.parametrize("count", [0, 1])
def test_few_rows_backwards(count: int) -> None:  # numpy calls them contiguous
    routes = Routes(np.array([ONE] * count, np.int32).reshape(count, 2, 2)[::-1], E)

    assert routes.expert_ids.tolist() == [ONE] * count


def test_it_owns_what_it_has_checked() -> None:
    ids = torch.tensor([ONE], dtype=torch.uint8)
    captured = torch.tensor([True])
    routes = Routes(ids, E, captured=captured)

    ids.zero_()
    captured.zero_()

    assert routes.expert_ids.tolist() == [ONE]
    assert routes.captured.tolist() == [True]


# --- holes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("hole", [[[-1, -1], [-1, -1]], [[0, 1], [-1, -1]], [[0, -1], [5, 2]]])
def test_minus_one_is_a_hole(hole: list[list[int]]) -> None:
    routes = Routes(rows(ONE, hole), E)

    assert routes.captured.tolist() == [True, False]
    assert routes.expert_ids.tolist() == [ONE, [[0, 0], [0, 0]]]
    assert routes.rejected == {}


def test_what_a_hole_holds_is_not_read() -> None:
    routes = Routes(rows(ONE, [[99, -7], [3, 3]]), E, captured=[True, False])

    assert routes.captured.tolist() == [True, False]
    assert routes.expert_ids.tolist() == [ONE, [[0, 0], [0, 0]]]


@pytest.mark.parametrize(
    "row, cause",
    [
        ([6, 1], "out of range"),
        ([-2, 1], "out of range"),
        ([300, 1], "out of range"),  # 76: 44 in 8 bits
        ([255, 1], "out of range"),  # -1 in 8 bits
        ([3, 3], "repeating"),
    ],
)
def test_an_invalid_row_raises_or_is_a_counted_hole(row: list[int], cause: str) -> None:  # 75
    ids = rows(ONE, [[0, 1], row], ONE)

    with pytest.raises(RouteError, match=r"expert_ids\[1, 1\] \(token 1.*expected distinct ids"):
        Routes(ids, E)
    routes = Routes(ids, E, on_invalid="hole")

    assert routes.captured.tolist() == [True, False, True]
    assert routes.expert_ids.tolist() == [ONE, [[0, 0], [0, 0]], ONE]
    assert routes.rejected == {cause: 1}


def test_255_in_eight_bits_is_an_expert() -> None:
    ids = np.asarray([[[255, 0]]], np.uint8)

    assert Routes(ids, 256).expert_ids.tolist() == [[[255, 0]]]
    assert Routes(ids, 256, layers="all").captured.tolist() == [True]
    with pytest.raises(RouteError, match="out of range"):
        Routes(ids, 255)


def test_a_number_of_experts_that_the_source_cannot_hold() -> None:
    routes = Routes(torch.tensor([[[100, -1]], [[100, 7]]], dtype=torch.int8), 300)

    assert routes.captured.tolist() == [False, True]


def test_huge_unsigned_ids_do_not_wrap_around_to_a_hole() -> None:
    ids = np.asarray([[[2**64 - 1, 1]]], np.uint64)

    with pytest.raises(RouteError, match="out of range"):
        Routes(ids, E)


@pytest.mark.parametrize("topk", [1, 2, 8, 20])
def test_repetitions_are_found_whatever_topk(topk: int) -> None:
    ids = torch.stack([torch.randperm(64)[:topk] for _ in range(50)]).unsqueeze(1)
    assert Routes(ids, 64).captured.all()

    if topk > 1:
        ids[7, 0, -1] = ids[7, 0, 0]
        with pytest.raises(RouteError, match=r"token 7.*twice in one row"):
            Routes(ids, 64)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.lists(st.lists(st.integers(-2, E), min_size=K, max_size=K), min_size=2, max_size=2),
        max_size=6,
    )
)
def test_against_plain_python(tokens: list[list[list[int]]]) -> None:
    captured, stored, causes = [], [], []
    for token in tokens:
        hole = any(-1 in row for row in token)
        outside = any(not 0 <= i < E for row in token for i in row)
        repeating = any(len(set(row)) < K for row in token)
        captured.append(not (hole or outside or repeating))
        stored.append(token if captured[-1] else [[0] * K, [0] * K])
        if not hole and not captured[-1]:
            causes.append("out of range" if outside else "repeating")

    routes = Routes(np.asarray(tokens, int).reshape(-1, 2, K), E, on_invalid="hole")

    assert routes.captured.tolist() == captured
    assert routes.expert_ids.tolist() == stored
    assert routes.rejected == {cause: causes.count(cause) for cause in set(causes)}


# --- the layer axis ---------------------------------------------------------------------------


def test_dense_layers_may_be_zeros_if_all_layers_are_there() -> None:
    ids = rows([[0, 0], [0, 1]], [[0, 0], [1, 2]])

    with pytest.raises(RouteError, match="twice in one row"):
        Routes(ids, E)
    routes = Routes(ids, E, layers="all")

    assert routes.empty_layers == (0,)
    assert routes.captured.tolist() == [True, True]


def test_dense_layers_may_be_minus_one_if_all_layers_are_there() -> None:
    routes = Routes(rows([[-1, -1], [0, 1]], [[-1, -1], [-1, -1]]), E, layers="all")

    assert routes.empty_layers == (0,)
    assert routes.captured.tolist() == [True, False]
    assert routes.expert_ids.tolist() == [[[0, 0], [0, 1]], [[0, 0], [0, 0]]]


def test_a_buffer_that_was_never_written_is_no_model_of_dense_layers() -> None:
    ids = torch.zeros(3, 2, 2, dtype=torch.int64)

    with pytest.raises(RouteError, match="twice in one row"):
        Routes(ids, E, layers="all")
    assert Routes(ids, E, layers="all", on_invalid="hole").rejected == {"repeating": 3}


def test_with_one_expert_for_each_token_zero_is_a_choice() -> None:
    routes = Routes(torch.zeros(3, 2, 1, dtype=torch.int64), E, layers="all")

    assert routes.empty_layers == ()
    assert routes.captured.all()


ENCODED = torch.stack([torch.tensor([[layer, 0]] * 4) for layer in range(1, 6)], dim=1)
"""[4 tokens, 5 layers, 2]: the first id is the layer number."""


def first_ids(routes: Routes) -> list[int]:
    return routes.expert_ids[0, :, 0].tolist()


def test_each_layer_gets_its_own_rows() -> None:  # 16: moe_layer_freq=[0, 1, 1, 0, 1]
    model = (2, 3, 5)
    every = Routes(ENCODED, E, layers="all")
    moe = Routes(ENCODED[:, [1, 2, 4]], E)
    named = Routes(ENCODED[:, [4, 1]], E, layers=(5, 2))

    assert first_ids(every.for_layers((2, 5), model)) == [2, 5]
    assert first_ids(moe.for_layers((2, 5), model)) == [2, 5]
    assert first_ids(named.for_layers((2, 5), model)) == [2, 5]
    assert moe.for_layers((3,), model).layers == (3,)
    assert first_ids(moe.for_layers((2, 5), model).for_layers((5,))) == [5]


def test_only_asked_for_layers_are_kept() -> None:
    chosen = Routes(ENCODED, E, layers="all").for_layers((2, 3))

    assert chosen.expert_ids.untyped_storage().nbytes() == 4 * 2 * 2
    assert chosen.expert_ids.is_contiguous()
    assert chosen.expert_ids.dtype is torch.uint8


def test_a_stage_without_moe_layers() -> None:
    assert Routes(ENCODED, E, layers="all").for_layers(()).expert_ids.shape == (4, 0, 2)


@pytest.mark.parametrize("count", [3, 4, 5])
def test_an_axis_of_another_length_is_refused(count: int) -> None:  # 24: freq [0, 1, 1, 1]
    model = (2, 3, 4)
    moe = Routes(ENCODED[:, :count], E)
    every = Routes(ENCODED[:, :count], E, layers="all")

    if count == 3:
        assert first_ids(moe.for_layers(model, model, num_layers=4)) == [1, 2, 3]
        with pytest.raises(RouteError, match=r"no routes for layers \[4\]"):
            every.for_layers(model, model)
    else:
        with pytest.raises(RouteError, match=f"{count} layers.*3 MoE layers.*layers='all'"):
            moe.for_layers(model, model, num_layers=4)
    if count == 4:
        assert first_ids(every.for_layers(model, model, num_layers=4)) == [2, 3, 4]
    else:
        with pytest.raises(RouteError, match=f"{count} layers.*the model has 4"):
            every.for_layers(model, model, num_layers=4)


def test_moe_layers_are_inferred_only_if_nothing_else_is_possible() -> None:
    routes = Routes(ENCODED[:, :3], E)

    assert first_ids(routes.for_layers((2, 3, 5))) == [1, 2, 3]  # they are all
    assert first_ids(routes.for_layers((3,), num_layers=3)) == [3]  # none is dense
    with pytest.raises(RouteError, match="pass moe_layers="):
        routes.for_layers((3,))
    with pytest.raises(RouteError, match="pass moe_layers="):
        routes.for_layers((3,), num_layers=4)


def test_layers_that_hold_nothing_cannot_be_replayed() -> None:
    ids = ENCODED.clone()
    ids[:, 0] = 0
    routes = Routes(ids, E, layers="all")

    assert first_ids(routes.for_layers((2,))) == [2]
    with pytest.raises(RouteError, match=r"layers \[1\] hold zeros or -1 only"):
        routes.for_layers((1, 2))


@pytest.mark.parametrize(
    "asked, model, message",
    [
        ((1,), (2, 3, 5), r"layers \[1\] are no MoE layers"),
        ((2, 2), (2, 3, 5), "twice"),
        ((0,), None, "from 1 on"),
    ],
)
def test_bad_questions_are_refused(asked: Any, model: Any, message: str) -> None:
    with pytest.raises(RouteError, match=message):
        Routes(ENCODED, E, layers="all").for_layers(asked, model)


# --- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ids, options, message",
    [
        ([[0, 1]], {}, r"shape \[1, 2\].*\[tokens, layers, topk\]"),
        ([[[0.0, 1.0]]], {}, "float64.*expected integers"),
        (torch.zeros(1, 1, 2), {}, "float32.*expected integers"),
        (torch.zeros(1, 1, 2, dtype=torch.bool), {}, "bool.*expected integers"),
        ([[[True, False]]], {}, "bool.*expected integers"),
        ([[[0, 1], [2]]], {}, "no array"),
        (None, {}, "expected integers"),
        ("abc", {}, "expected integers"),
        (torch.zeros(1, 1, 2, dtype=torch.int64, device="meta"), {}, "is on meta.*ids.cpu()"),
        (torch.zeros(1, 1, 0, dtype=torch.int64), {}, "K is 0"),
        (torch.zeros(1, 1, 7, dtype=torch.int64), {}, "K is 7: expected 1 to num_experts=6"),
        ([ONE], {"num_experts": 0}, "num_experts is 0"),
        ([ONE], {"num_experts": True}, "num_experts is True"),
        ([ONE], {"num_experts": 2**31 + 1}, "at most 2"),
        ([ONE], {"start": -1}, "start is -1"),
        ([ONE], {"captured": [1]}, "dtype int64.*expected bool"),
        ([ONE], {"captured": [True, True]}, r"shape \[2\].*expected bool \[1\]"),
        ([ONE], {"captured": torch.ones(1, 1, dtype=torch.bool)}, r"shape \[1, 1\]"),
        ([ONE], {"layers": "dense"}, "'moe', 'all' or a tuple"),
        ([ONE], {"layers": (2,)}, "names 1 layers, and expert_ids has 2"),
        ([ONE], {"layers": (2, 2)}, "twice"),
        ([ONE], {"layers": (0, 1)}, "from 1 on"),
        ([ONE], {"layers": 3}, "expected layer numbers"),
        ([ONE], {"on_invalid": "ignore"}, "'raise' or 'hole'"),
    ],
)
def test_refused(ids: Any, options: dict[str, Any], message: str) -> None:
    options = {"num_experts": E} | options

    with pytest.raises(RouteError, match=message):
        Routes(ids, options.pop("num_experts"), **options)


def test_no_tokens_and_no_layers() -> None:
    assert Routes(torch.zeros(0, 2, 2, dtype=torch.int64), E).num_tokens == 0
    assert Routes(torch.zeros(3, 0, 2, dtype=torch.int64), E, layers=()).captured.all()
    assert Routes(np.zeros((0, 2, 2), int), E, captured=[], layers="all").num_layers == 2
