"""Pieces of one trajectory: appended, truncated, sliced."""

import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replay_patch import RouteError, Routes

E, L, K = 64, 3, 2
TRAJECTORY = torch.rand(12, L, E, generator=torch.Generator().manual_seed(0)).argsort(2)[..., :K]
OTHER = (TRAJECTORY + 1) % E  # differs in every token


def piece(first: int, end: int, ids: torch.Tensor = TRAJECTORY, **options: Any) -> Routes:
    return Routes(ids[first:end], E, start=first, **options)


def assert_is(routes: Routes, first: int, end: int) -> None:
    assert (routes.start, routes.num_tokens) == (first, end - first)
    assert torch.equal(routes.expert_ids.long(), TRAJECTORY[first:end])
    assert routes.captured.all()
    assert routes.rejected == {}


# --- append -----------------------------------------------------------------------------------


def test_new_rows_are_appended() -> None:
    assert_is(piece(0, 5).append(piece(5, 9)), 0, 9)
    assert_is(piece(3, 5).append(piece(5, 9)).append(piece(9, 12)), 3, 12)


def test_pieces_from_other_containers() -> None:  # 84
    first, second, third = TRAJECTORY[:2].tolist(), TRAJECTORY[2:4].numpy(), TRAJECTORY[4:6]

    routes = Routes(first, E).append(Routes(second, E, start=2)).append(Routes(third, E, start=4))

    assert_is(routes, 0, 6)


def test_a_repeated_prefix_is_kept_once() -> None:  # 69
    routes = piece(0, 5).append(piece(0, 7))
    assert_is(routes, 0, 7)
    assert_is(routes.append(piece(0, 7)), 0, 7)  # nothing new
    assert_is(routes.append(piece(7, 7)), 0, 7)  # not even rows
    assert_is(routes.append(piece(0, 3)), 0, 7)
    assert_is(piece(0, 0).append(routes), 0, 7)
    assert_is(piece(2, 6).append(piece(0, 9)), 0, 9)


def test_the_rows_of_the_pass_that_produced_a_token_stay() -> None:  # 69
    routes = piece(0, 5).append(piece(0, 7, OTHER), on_mismatch="count")

    assert torch.equal(routes.expert_ids[:5].long(), TRAJECTORY[:5])
    assert torch.equal(routes.expert_ids[5:].long(), OTHER[5:7])
    assert routes.rejected == {"mismatch": 5}
    assert routes.captured.all()
    assert routes.truncate(2).rejected == {"mismatch": 2}


def test_a_mismatch_says_where_it_is() -> None:
    later = TRAJECTORY.clone()
    later[3:5, 1] = OTHER[3:5, 1]

    text = (
        "trajectory 4, turn 2: token 3, place 1 of the layer axis: the later piece has "
        f"{later[3, 1].tolist()}, expected {TRAJECTORY[3, 1].tolist()} as the earlier one has. "
        "1 more tokens differ"
    )
    with pytest.raises(RouteError, match=re.escape(text)):
        piece(0, 5).append(piece(0, 7, later), name="trajectory 4, turn 2")
    with pytest.raises(RouteError, match="token 3, layer 5 of the layer axis"):
        piece(0, 5, layers=(2, 5, 6)).append(piece(0, 7, later, layers=(2, 5, 6)))


def test_the_order_in_a_row_is_no_mismatch() -> None:
    assert_is(piece(0, 5).append(piece(0, 5, TRAJECTORY.flip(2))), 0, 5)


def test_holes_are_filled_by_the_other_piece() -> None:
    early = piece(0, 5, captured=[True, False, True, False, True])
    late = piece(1, 7, captured=[True, False, False, True, True, True])

    routes = early.append(late)

    assert routes.captured.tolist() == [True, True, True, False, True, True, True]
    assert torch.equal(routes.expert_ids[routes.captured].long(), TRAJECTORY[:7][routes.captured])
    assert not routes.expert_ids[~routes.captured].any()


def test_a_rejected_row_is_forgotten_when_it_is_filled() -> None:
    bad = TRAJECTORY.clone()
    bad[1:3, 0, 0] = E
    early = piece(0, 4, bad, on_invalid="hole")

    assert early.append(piece(1, 2)).rejected == {"out of range": 1}
    assert piece(0, 1).append(early).rejected == {"out of range": 2}
    assert piece(0, 3, captured=[True, True, False]).append(early).rejected == {"out of range": 1}


def test_the_last_sampled_token_of_a_turn_is_a_hole_between_pieces() -> None:
    routes = piece(0, 5).append(piece(6, 9))

    assert routes.captured.tolist() == [True] * 5 + [False] + [True] * 3
    assert torch.equal(routes.expert_ids[6:].long(), TRAJECTORY[6:9])


def test_a_longer_gap_is_a_lost_turn_unless_it_is_allowed() -> None:  # 70
    with pytest.raises(RouteError, match=r"begins at token 7.*ends at 5: 2 tokens are in neither"):
        piece(0, 5).append(piece(7, 9))

    routes = piece(0, 5).append(piece(7, 9), on_gap="hole")

    assert routes.captured.tolist() == [True] * 5 + [False] * 2 + [True] * 2


@pytest.mark.parametrize(
    "later, options, text",
    [
        (Routes(TRAJECTORY, 65), {}, r"\(65, 2, 3, 'moe'\): expected \(64, 2, 3, 'moe'\)"),
        (Routes(TRAJECTORY[:, :2], E), {}, r"\(64, 2, 2, 'moe'\): expected"),
        (Routes(TRAJECTORY[..., :1], E), {}, r"\(64, 1, 3, 'moe'\): expected"),
        (piece(0, 7, layers="all"), {}, r"'all'\): expected"),
        (piece(0, 2), {}, "ends at token 2, and the earlier one begins at 4"),
        (None, {}, "a NoneType: expected Routes"),
        (
            piece(0, 7),
            {"on_mismatch": "ignore"},
            "on_mismatch='ignore': expected 'raise' or 'count'",
        ),
        (piece(0, 7), {"on_gap": None}, "on_gap=None: expected 'raise' or 'hole'"),
    ],
)
def test_pieces_that_do_not_fit_are_refused(later: Any, options: Any, text: str) -> None:
    with pytest.raises(RouteError, match=text):
        piece(4, 6).append(later, **options)


def test_dense_layers_must_be_the_same_in_both() -> None:
    dense = TRAJECTORY.clone()
    dense[:, 0] = 0
    routes = piece(0, 5, dense, layers="all")
    holes = piece(5, 7, torch.full_like(dense, -1), layers="all")

    assert routes.append(piece(5, 9, dense, layers="all")).empty_layers == (0,)
    assert routes.append(holes).empty_layers == (0,)
    assert piece(0, 5, torch.full_like(dense, -1), layers="all").append(
        piece(5, 9, dense, layers="all")
    ).empty_layers == (0,)
    with pytest.raises(RouteError, match=r"places \[\] .*in the later piece: expected \[0\]"):
        routes.append(piece(5, 9, layers="all"))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_append_against_plain_python(data: Any) -> None:
    def drawn() -> tuple[Routes, dict[int, Any]]:
        first = data.draw(st.integers(0, 8))
        end = data.draw(st.integers(first, 12))
        source = [data.draw(st.sampled_from([TRAJECTORY, OTHER]))[i] for i in range(first, end)]
        known = [data.draw(st.booleans()) for _ in source]
        ids = torch.stack(source) if source else TRAJECTORY[:0]
        tokens = {first + i: ids[i].tolist() if known[i] else None for i in range(len(known))}
        return Routes(ids, E, captured=known, start=first), tokens

    (early, one), (late, other) = drawn(), drawn()
    if late.start + late.num_tokens < early.start and late.num_tokens:
        return
    expected = dict(one)
    mismatches = 0
    for token, row in other.items():
        if expected.get(token) is None:
            expected[token] = row
        elif row is not None:
            mismatches += sorted(map(sorted, row)) != sorted(map(sorted, expected[token]))

    routes = early.append(late, "count", on_gap="hole")

    assert routes.rejected.get("mismatch", 0) == mismatches
    for i in range(routes.num_tokens):
        row = expected.get(routes.start + i)
        assert bool(routes.captured[i]) == (row is not None)
        assert routes.expert_ids[i].tolist() == (row or [[0] * K] * L)
    assert set(expected) <= set(range(routes.start, routes.start + routes.num_tokens))


# --- truncate and slices ----------------------------------------------------------------------


def test_a_cut_response() -> None:
    assert_is(piece(0, 12).truncate(7), 0, 7)
    assert_is(piece(4, 12).truncate(7), 4, 7)  # the trajectory's tokens count, not the rows
    assert piece(0, 12).truncate(0).num_tokens == 0
    assert piece(0, 12).truncate(0).expert_ids.shape == (0, L, K)


def test_a_piece_behind_the_cut_is_empty_and_ends_there() -> None:
    routes = piece(4, 12).truncate(2)

    assert (routes.start, routes.num_tokens) == (2, 0)


def test_nothing_to_cut_is_no_copy() -> None:
    routes = piece(0, 5)

    assert routes.truncate(5) is routes
    assert routes.truncate(6) is routes


def test_what_was_cut_off_is_freed() -> None:  # 85
    routes = piece(0, 12).truncate(2)

    assert routes.expert_ids.untyped_storage().nbytes() == 2 * L * K
    assert routes.captured.untyped_storage().nbytes() == 2


@pytest.mark.parametrize("given", [-1, None, 2.0, True, "2"])
def test_no_number_of_tokens(given: Any) -> None:
    with pytest.raises(RouteError, match="num_tokens is"):
        piece(0, 5).truncate(given)


def test_slices_know_where_they_begin() -> None:
    assert_is(piece(2, 12)[3:6], 5, 8)
    assert_is(piece(2, 12)[:-2], 2, 10)
    assert_is(piece(2, 12)[-2:], 10, 12)
    assert piece(2, 12)[-0:].num_tokens == 10
    assert piece(2, 12)[6:3].num_tokens == 0


def test_slices_are_put_together_again() -> None:
    routes = piece(2, 12, captured=[i % 3 > 0 for i in range(10)])

    again = routes[:4].append(routes[4:])

    assert torch.equal(again.expert_ids, routes.expert_ids)
    assert torch.equal(again.captured, routes.captured)
    assert again.start == routes.start


@pytest.mark.parametrize("rows", [3, slice(None, None, 2), slice(None, None, -1), [1, 2]])
def test_only_consecutive_rows(rows: Any) -> None:
    with pytest.raises(RouteError, match=r"expected a slice of consecutive rows, routes\[a:b\]"):
        piece(0, 12)[rows]


def test_notes_go_with_their_tokens() -> None:
    bad = TRAJECTORY.clone()
    bad[[1, 4], 0, 0] = E
    bad[5, 0, 0] = bad[5, 0, 1]
    routes = piece(0, 8, bad, on_invalid="hole")

    assert routes.rejected == {"out of range": 2, "repeating": 1}
    assert routes.truncate(5).rejected == {"out of range": 2}
    assert routes[2:].rejected == {"out of range": 1, "repeating": 1}
    assert routes[2:4].rejected == {}
    assert routes.for_layers((1,), (1, 2, 3)).rejected == routes.rejected
