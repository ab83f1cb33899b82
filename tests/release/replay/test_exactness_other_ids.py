"""Other ids give what a plain formula gives, to the last bit.

Ids outside the native choice have weight and gradient, and the expert bias shows in no weight.
"""

import pytest
import torch
from helpers.exactness import (
    BIAS,
    PRECISIONS,
    ROUTING,
    E,
    act,
    by_formula,
    differing,
    make_input,
    make_router,
    rules,
    some_ids,
)
from helpers.routers import BACKWARD, FORWARD
from hypothesis import given, settings
from hypothesis import strategies as st


def test_one_dtype_rule_explains_native_routing() -> None:
    assert len(rules()) == 1


@given(st.sampled_from(sorted(ROUTING)), st.sampled_from(sorted(PRECISIONS)), st.integers(0, 2**31))
@settings(deadline=None, derandomize=True, max_examples=80)
def test_other_ids_give_what_the_formula_gives_bitwise(
    case: str, precision: str, seed: int
) -> None:
    router = make_router(case, precision, seed)
    replay, given_, ids = router.router_replay, make_input(router), some_ids(router.topk)
    replay.set_target_indices(ids)

    expected = by_formula(router, ids, *given_, rules()[0])

    assert differing(expected, act(router, FORWARD, *given_)) == []
    assert differing(expected, act(router, BACKWARD, *given_)) == []


@pytest.mark.parametrize("case", [case for case in ROUTING if "K=E" not in case])
def test_experts_outside_the_native_choice_have_weight_and_gradient(case: str) -> None:
    router = make_router(case)
    replay, (hidden, _) = router.router_replay, make_input(router)
    unwanted = (~router(hidden)[1]).float().topk(router.topk).indices  # E >= 2 K
    replay.set_target_indices(unwanted)
    replay.set_router_replay_action(FORWARD)
    hidden = hidden.requires_grad_()

    probs, routing_map = router(hidden)
    chosen = probs.gather(1, unwanted)
    chosen[:, 0].sum().backward()

    assert bool(routing_map.gather(1, unwanted).all())
    assert bool((chosen > 0).all())
    assert bool((hidden.grad.norm(dim=-1) > 0).all())
    assert bool((router.weight.grad.norm(dim=-1) > 0)[unwanted[:, 0]].all())


@pytest.mark.parametrize(
    "case", [name for name, options in ROUTING.items() if BIAS.items() <= options.items()]
)
def test_a_large_bias_shows_in_no_weight(case: str) -> None:
    router = make_router(case)
    replay, given_, ids = router.router_replay, make_input(router), some_ids(router.topk)
    replay.set_target_indices(ids)

    outcomes = []
    for bias in (torch.zeros(E), torch.full((E,), 5.0), 5.0 * torch.eye(E)[0]):
        router.expert_bias.copy_(bias)
        outcomes.append(act(router, FORWARD, *given_))

    assert differing(outcomes[0], outcomes[1]) == []
    assert differing(outcomes[0], outcomes[2]) == []
