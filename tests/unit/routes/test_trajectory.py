"""Rows of several generate calls at the tokens of one trajectory, against a plain-Python search."""

import asyncio
import random
from collections import UserDict

import numpy as np
import pytest
import torch

from replay_patch.errors import RouteError
from replay_patch.routes.trajectory import HOLE, Trajectory, current


def rows(tokens: list[int], call: int = 0) -> np.ndarray:
    """int32 [tokens, 2 layers, 2 experts], of no two tokens, places or calls the same."""
    return np.array([[[i + call * 50, t], [i, t + 1]] for i, t in enumerate(tokens)], np.int32)


def of(*calls: tuple[list[int], list[int], np.ndarray | None]) -> Trajectory:
    trajectory = Trajectory("sample 7")
    for call in calls:
        trajectory.add(*call)
    return trajectory


def captured(routes: np.ndarray) -> list[bool]:
    return [bool((row >= 0).all()) for row in routes]


@pytest.mark.parametrize("held", [2, 3])
def test_the_last_sampled_token_has_no_row(held: int) -> None:
    routes = of(([5, 6], [7], rows([5, 6, 7])[:held])).routes([5, 6, 7])

    assert routes.dtype == np.int32
    assert (routes[:2] == rows([5, 6])).all()
    assert (routes[2] == HOLE).all()


@pytest.mark.parametrize("later", [[7, 8], [7, 8, 9, 10]])
def test_a_resumed_generation_keeps_the_rows_of_the_call_that_sampled(later: list[int]) -> None:
    """Case 69: 5 rows, then 7 with 2 new ones; then 7 with none."""
    prompt, first = [1, 2, 3, 4], [5, 6]
    whole = [*prompt, *first, *later]
    trajectory = of((prompt, first, rows(whole[:5])), (whole[:6], later, rows(whole[:-1], call=1)))
    trajectory.add(whole, [], rows(whole[:-1], call=2))

    routes = trajectory.routes(whole)

    assert (routes[:5] == rows(whole)[:5]).all()
    assert (routes[5:-1] == rows(whole, call=1)[5:-1]).all()
    assert captured(routes) == [True] * (len(whole) - 1) + [False]


def test_a_call_without_routes_shifts_nothing() -> None:
    routes = of(
        ([1], [2, 3], rows([1, 2])),
        ([1, 2, 3], [4, 5], None),
        ([1, 2, 3, 4, 5], [6], rows([1, 2, 3, 4, 5])),
    ).routes([1, 2, 3, 4, 5, 6])

    assert (routes[:5] == rows([1, 2, 3, 4, 5])).all()


def test_rows_of_other_tokens_are_not_taken() -> None:
    """The tool loop retokenised from the third token on."""
    routes = of(([1, 2, 3], [4], rows([1, 2, 3]))).routes([1, 2, 9, 4])

    assert captured(routes) == [True, True, False, False]


def test_a_row_with_a_negative_id_is_taken_from_the_next_call() -> None:
    cached = rows([1, 2, 3])
    cached[:2] = -1  # vLLM 0.21, of cached positions
    routes = of(([1, 2, 3], [4], cached), ([1, 2, 3, 4], [5], rows([1, 2, 3, 4], 1))).routes(
        [1, 2, 3, 4, 5]
    )

    assert captured(routes) == [True] * 4 + [False]
    assert routes[2, 0, 0] == 2
    assert routes[1, 0, 0] == 51


@pytest.mark.parametrize("filling", ["last", "zeros"])
def test_a_row_that_nobody_wrote_is_taken_from_the_next_call(filling: str) -> None:
    first = rows([1, 2, 3], 2)
    first[-1 if filling == "last" else 1] = 0
    routes = of(([1, 2], [3], first), ([1, 2, 3], [4], rows([1, 2, 3]))).routes([1, 2, 3, 4])

    assert captured(routes) == [True] * 3 + [False]
    assert (routes[2] == rows([1, 2, 3])[2]).all()
    assert (routes[1] == rows([1, 2], 2 if filling == "last" else 0)[1]).all()


def test_expert_0_of_top_1_is_a_choice() -> None:
    routes = of(([1, 2], [3], np.zeros((2, 4, 1), np.uint8))).routes([1, 2, 3])

    assert captured(routes) == [True, True, False]


@pytest.mark.parametrize("none", [None, np.zeros((0, 2, 2), np.int32), []])
def test_no_call_has_routes(none: object) -> None:
    assert of(([1], [2], none)).routes([1, 2]) is None


@pytest.mark.parametrize(
    "prompt",
    [
        (5, 6),
        np.array([5, 6], np.uint16),
        torch.tensor([[5, 6]]),
        [[5, 6]],
        UserDict(input_ids=[5, 6], attention_mask=[1, 1]),  # as transformers' BatchEncoding
    ],
)
def test_prompts_come_in_any_form_that_servers_take(prompt: object) -> None:
    routes = of((prompt, [7], rows([5, 6]))).routes([5, 6, 7])

    assert captured(routes) == [True, True, False]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int16, np.int64])
@pytest.mark.parametrize("form", ["read-only", "strided", "torch"])
def test_rows_come_in_any_form(dtype: type, form: str) -> None:
    given = np.repeat(rows([5, 6]), 2, axis=0).astype(dtype)[::2]
    given.flags.writeable = form != "read-only"
    routes = of(([5, 6], [7], torch.tensor(given) if form == "torch" else given)).routes([5, 6, 7])

    assert routes.flags.writeable  # or torch.from_numpy warns
    assert (routes[:2] == rows([5, 6])).all()


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int16, np.int64])
def test_ids_of_any_integer_type_are_kept(dtype: type) -> None:
    largest = np.iinfo(dtype).max if dtype in (np.uint8, np.uint16) else 300
    routes = of(([1], [2], np.full((1, 1, 1), largest, dtype))).routes([1, 2])

    assert routes.dtype == np.int32
    assert routes[0, 0, 0] == largest


@pytest.mark.parametrize(
    "given, message",
    [
        (
            rows([1]),
            "1 rows of routed_experts for 2 prompt and 1 generated tokens; expected 2 or 3",
        ),
        (rows([1, 2, 3, 4]), "4 rows"),
        (rows([1, 2])[0], r"int32 \[2, 2\]; expected integers \[tokens, layers, topk\]"),
        (rows([1, 2]).astype(float), "float64"),
    ],
)
def test_rows_that_do_not_fit_are_refused_with_the_sample(given: np.ndarray, message: str) -> None:
    with pytest.raises(RouteError, match=f"sample 7, generate call 1: .*{message}"):
        of(([1, 2], [3], given))


def test_calls_of_two_models_are_refused() -> None:
    with pytest.raises(RouteError, match=r"call 2: routes of \[1, 2\] layers .* have \[2, 2\]"):
        of(([1], [2], rows([1])), ([1, 2], [3], rows([1, 2])[:, :1]))
    with pytest.raises(RouteError, match=r"call 2: routes of \[1, 2\] layers .* have \[2, 2\]"):
        of(([1], [2], rows([1]))).extend(of(([1, 2], [3], rows([1, 2])[:, :1])))


def test_any_calls_against_a_search_by_token() -> None:
    chance = random.Random(0)
    for _ in range(300):
        wanted = [chance.randrange(3) for _ in range(chance.randrange(1, 9))]
        calls = []
        for number in range(chance.randrange(1, 4)):
            tokens = [*wanted[: chance.randrange(len(wanted) + 1)], chance.randrange(3)]
            cut = chance.randrange(len(tokens) + 1)
            held = len(tokens) - chance.randrange(2)
            given = rows(tokens, number)[:held] if chance.random() < 0.7 else None
            calls.append((tokens[:cut], tokens[cut:], given))
        expected: list[list[int] | None] = []
        for place in range(len(wanted)):
            fitting = [
                given[place].tolist()
                for prompt, new, given in calls
                if given is not None
                and place < min(len(given), len(prompt) + len(new) - 1)
                and [*prompt, *new][: place + 1] == wanted[: place + 1]
            ]
            expected.append(fitting[0] if fitting else None)

        routes = of(*calls).routes(wanted)

        if routes is None:
            assert all(given is None or not len(given) for *_, given in calls)
        else:
            got = [row.tolist() if (row >= 0).all() else None for row in routes]
            assert got == expected


def test_tasks_of_a_trajectory_share_it_and_others_do_not() -> None:
    async def turn(token: int) -> None:
        current.get().add([token], [0], rows([token]))

    async def trajectory(token: int) -> list[int]:
        current.set(Trajectory())
        await asyncio.gather(*(asyncio.create_task(turn(token)) for _ in range(2)))
        return current.get().routes([token])[0, 0].tolist()

    async def both() -> list[list[int]]:
        return await asyncio.gather(trajectory(3), trajectory(4))

    assert asyncio.run(both()) == [[0, 3], [0, 4]]
    assert current.get() is None
