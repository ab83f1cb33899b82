"""Filtering and reordering trajectories with everything that belongs to them."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replay_patch import RouteBatch, RouteError, Routes
from replay_patch.routes import select_fields

TOKENS = [[5, 6, 7], [8, 9], [1], [2, 3, 4, 5], [6, 6]]


def routes_of(tokens: list[int]) -> Routes:
    """Routes that say which tokens they belong to."""
    return Routes(torch.tensor([[[token, token + 1]] for token in tokens]), 16)


def batch() -> dict[str, Any]:
    nested = [torch.tensor(tokens) for tokens in TOKENS]
    return {
        "tokens": TOKENS,
        "routes": RouteBatch(map(routes_of, TOKENS)),
        "rewards": torch.arange(5.0),
        "uid": np.array(list("abcde"), dtype=object),
        "nested": torch.nested.as_nested_tensor(nested, layout=torch.jagged),
        "stop": ("a", "b", "c", "d", "e"),
        "extra": {"turns": [1, 2, 3, 4, 5]},
        "values": None,
    }


def matches(tokens: list[int], routes: Routes) -> bool:
    return routes.expert_ids[:, 0, 0].tolist() == tokens


def test_routes_stay_with_their_tokens() -> None:  # 57
    order = [3, 1, 0, 4, 2]

    chosen = select_fields(batch(), order)
    microbatches = chosen["routes"].split([3, 2])

    assert [len(part) for part in microbatches] == [3, 2]
    assert chosen["tokens"] == [TOKENS[i] for i in order]
    routes = [one for part in microbatches for one in part]
    assert all(map(matches, chosen["tokens"], routes))


def test_every_field_is_selected_alike_and_keeps_its_type() -> None:
    given, indices = batch(), [4, 0, 0]

    chosen = select_fields(given, indices)

    assert list(chosen) == list(given)
    assert all(type(chosen[name]) is type(given[name]) for name in given)
    assert chosen["rewards"].tolist() == [4.0, 0.0, 0.0]
    assert chosen["uid"].tolist() == ["e", "a", "a"]
    assert [part.tolist() for part in chosen["nested"].unbind()] == [TOKENS[i] for i in indices]
    assert chosen["stop"] == ("e", "a", "a")
    assert chosen["extra"] == {"turns": [5, 1, 1]}
    assert chosen["values"] is None
    assert len(given["tokens"]) == 5


@settings(deadline=None)
@given(st.lists(st.integers(0, 4)))
def test_any_selection(indices: list[int]) -> None:
    chosen = select_fields({k: v for k, v in batch().items() if k != "nested"}, indices)

    assert chosen["tokens"] == [TOKENS[i] for i in indices]
    assert len(chosen["routes"]) == len(indices)
    assert all(map(matches, chosen["tokens"], chosen["routes"]))


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_a_filter_of_bools(kind: Any) -> None:
    keep = kind([True, False, False, True, False])

    assert select_fields(batch(), keep)["tokens"] == [TOKENS[0], TOKENS[3]]
    assert len(RouteBatch(map(routes_of, TOKENS)).select(keep)) == 2


@pytest.mark.parametrize("kind", [np.array, torch.tensor, tuple, iter])
def test_indices_of_any_kind(kind: Any) -> None:
    chosen = RouteBatch(map(routes_of, TOKENS)).select(kind([1, 0]))

    assert all(map(matches, [TOKENS[1], TOKENS[0]], chosen))


def test_shared_fields_are_passed_on() -> None:
    given = {"tokens": TOKENS, "temperature": 0.7, "name": "x"}

    chosen = select_fields(given, [0], shared=("temperature", "name"))

    assert chosen == {"tokens": [TOKENS[0]], "temperature": 0.7, "name": "x"}


def test_a_device_field_stays_there() -> None:
    chosen = select_fields({"x": torch.empty(3, 2, device="meta")}, [0, 2])["x"]

    assert chosen.device.type == "meta"
    assert chosen.shape == (2, 2)


def test_an_empty_selection() -> None:
    assert select_fields({"x": [1, 2], "y": torch.ones(2)}, [])["y"].shape == (0,)
    assert select_fields({}, []) == {}


@pytest.mark.parametrize(
    "change, indices, message",
    [
        ({"rewards": torch.ones(4)}, [0], "'rewards' has 4 entries: expected 5.*'tokens'"),
        ({"routes": RouteBatch([])}, [0], "'routes' has 0 entries: expected 5"),
        ({"extra": {"turns": [1]}}, [0], "'extra.turns' has 1 entries"),
        ({"temperature": 0.7}, [0], "'temperature' is a float.*shared"),
        ({"name": "abcde"}, [0], "'name' is a str"),
        ({}, [5], r"indices\[0\] is 5: expected a place from 0 to 4"),
        ({}, [0, -1], r"indices\[1\] is -1"),
        ({}, [True, 1], r"indices\[0\] is True"),
        ({}, [True, False], "2 bools: expected 5"),
        ({}, [0.0], r"indices\[0\] is 0.0"),
        ({}, "01", "indices='01'"),
        ({}, 3, "indices=3"),
        ({}, torch.ones(1, device="meta"), "indices is on meta"),
    ],
)
def test_refused(change: dict[str, Any], indices: Any, message: str) -> None:
    with pytest.raises(RouteError, match=message):
        select_fields(batch() | change, indices)


def test_an_unknown_shared_name_is_refused() -> None:
    with pytest.raises(RouteError, match=r"shared names \['temp'\]"):
        select_fields(batch(), [0], shared=["temp"])
