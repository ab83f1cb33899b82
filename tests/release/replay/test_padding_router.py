"""Rows of padding count in no loss of a router, and in no count, on every release.

What each loss has to be is computed from its definition (`helpers.padding_cases.by_formula`).
"""

from typing import Any

import pytest
import torch
from helpers.padding_cases import (
    COUNTS_CHOICES_IN_USE,
    GLOBAL_AUX,
    KINDS,
    NATIVE,
    RELEASE,
    SIGMOID_BIAS,
    B,
    E,
    H,
    K,
    S,
    T,
    by_formula,
    hidden_states,
    make_router,
    ragged_mask,
    run,
)
from megatron.core.transformer.moe.router_replay import RouterReplayAction
from torch import Tensor

from replay_patch import LayoutError

OPTIONS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "sigmoid, bias": SIGMOID_BIAS,
    "per token": {"calculate_per_token_loss": True},
    "capacity": {"moe_expert_capacity_factor": 0.5},
}


def close(a: Tensor, b: Tensor) -> bool:
    a, b = a.double(), b.double()
    return bool((a - b).norm() <= 1e-5 * a.norm() + 1e-12)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", ["none", *KINDS])
def test_losses_and_gradients_are_those_of_the_real_rows(kind: str, options: str) -> None:
    router, hidden, mask = make_router(kind, **OPTIONS[options]), hidden_states(), ragged_mask()

    found = run(router, hidden, padding_mask=mask)

    chosen = found["map"]
    if options == "capacity":  # 0.12 counts for the switch loss what capacity dropped, too
        chosen = chosen if kind == "seq_aux_loss" else logits_of(router, hidden).topk(K).indices
        if kind != "seq_aux_loss":
            chosen = torch.zeros(T, E).bool().scatter(1, chosen, True)
    losses, weight, given = by_formula(router, hidden, mask, kind, chosen)
    assert [float(one) for one in found["losses"]] == pytest.approx(list(map(float, losses)))
    assert close(weight, found["weight gradient"])
    assert close(given, found["input gradient"])
    assert not found["input gradient"][mask].any()
    if found["counts"] is not None:
        assert torch.equal(found["counts"], found["map"][~mask.flatten()].sum(0).float())


def logits_of(router: Any, hidden: Tensor) -> Tensor:
    return (hidden @ router.weight.t()).flatten(0, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_changes_no_choice_and_no_probability(kind: str) -> None:
    router, hidden = make_router(kind, **SIGMOID_BIAS), hidden_states()

    plain, masked = run(router, hidden), run(router, hidden, padding_mask=ragged_mask())

    assert torch.equal(plain["probs"], masked["probs"])
    assert torch.equal(plain["map"], masked["map"])
    assert not torch.equal(plain["weight gradient"], masked["weight gradient"])


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", ["none", *KINDS])
def test_a_mask_without_padding_is_no_mask(kind: str, options: str) -> None:
    router, hidden = make_router(kind, **OPTIONS[options]), hidden_states()

    plain = run(router, hidden)
    masked = run(router, hidden, padding_mask=torch.zeros(S, B, dtype=torch.bool))

    for name, value in plain.items():
        if name == "losses":
            assert list(map(float, masked[name])) == pytest.approx(list(map(float, value)))
        elif value is not None and not NATIVE:  # Megatron's own divides in another order
            assert torch.equal(value, masked[name]), name
        elif value is not None:
            assert close(value, masked[name]), name


@pytest.mark.parametrize("options", ["softmax", "sigmoid, bias", "per token"])
@pytest.mark.parametrize("kind", ["none", *KINDS])
def test_a_microbatch_of_padding_only_gives_no_loss_and_no_nan(kind: str, options: str) -> None:
    router = make_router(kind, **OPTIONS[options])

    found = run(router, hidden_states(), padding_mask=torch.ones(S, B, dtype=torch.bool))

    assert [float(one) for one in found["losses"]] == [0.0] * (1 if kind == "none" else 2)
    assert not found["weight gradient"].any()
    assert not found["input gradient"].any()
    assert found["counts"] is None or not found["counts"].any()


@pytest.mark.parametrize("rows", [1, 2, E], ids=["one token", "two", "tokens == experts"])
@pytest.mark.parametrize("masked", [0, 1])
def test_few_rows(rows: int, masked: int) -> None:
    router = make_router("aux_loss", **SIGMOID_BIAS)
    hidden = hidden_states(rows, 1)
    mask = (torch.arange(rows) < masked).unsqueeze(1)

    found = run(router, hidden, padding_mask=mask)

    assert found["counts"].sum() == (rows - masked) * K
    assert torch.equal(found["counts"], found["map"][masked:].sum(0).float())
    if masked < rows:
        _, weight, _ = by_formula(router, hidden, mask, "aux_loss", found["map"])
        assert close(weight, found["weight gradient"])


def test_true_means_padding() -> None:
    """Megatron's docstrings say the reverse of its code (case 26)."""
    router = make_router(**SIGMOID_BIAS)
    mask = torch.zeros(5, 2, dtype=torch.bool)
    mask[3, 1] = True

    found = run(router, hidden_states(5, 2), padding_mask=mask)

    assert found["counts"].sum() == 9 * K


def test_without_gradients_nothing_is_counted() -> None:
    router = make_router("aux_loss", **SIGMOID_BIAS)
    with torch.no_grad():
        for training in (True, False):
            router.train(training)(hidden_states(), padding_mask=ragged_mask())

    assert not router.local_tokens_per_expert.any()


@pytest.mark.parametrize("kind", KINDS)
def test_counts_go_on_over_microbatches(kind: str) -> None:
    router, mask = make_router(kind, **SIGMOID_BIAS), ragged_mask()
    expected = torch.zeros(E)
    for seed in range(3):
        _, routing_map = router(hidden_states(seed=seed), padding_mask=mask)
        expected += routing_map[~mask.flatten()].sum(0)

    assert torch.equal(expected, router.local_tokens_per_expert)


@pytest.mark.skipif(not GLOBAL_AUX, reason="no global auxiliary loss before 0.15")
def test_the_global_loss_averages_counts_of_real_rows() -> None:
    router, mask = make_router("global_aux_loss"), ragged_mask()
    for seed in range(2):
        router(hidden_states(seed=seed), padding_mask=mask)

    assert router.ga_steps == 2
    assert router.global_tokens_per_expert.sum() == 2 * K * (~mask).sum()


@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss"])
def test_auxiliary_losses_of_replayed_experts_are_the_releases_own(kind: str) -> None:
    """D11: 0.12 counts the experts in use, later releases a top-k of their own."""
    options = {"enable_routing_replay": True}
    router, hidden, mask = make_router(kind, **options), hidden_states(), ragged_mask()
    ids = logits_of(router, hidden).argsort(1)[:, :K].contiguous()  # those it likes least
    router.router_replay.set_target_indices(ids)
    router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)

    found = run(router, hidden, padding_mask=mask)

    given = torch.zeros(T, E).bool().scatter(1, ids, True)
    assert torch.equal(found["map"], given)
    losses, weight, _ = by_formula(router, hidden, mask, kind, given)
    assert [float(one) for one in found["losses"]] == pytest.approx(list(map(float, losses)))
    assert close(weight, found["weight gradient"])
    assert (RELEASE == (0, 12)) is COUNTS_CHOICES_IN_USE


@pytest.mark.skipif(NATIVE, reason="Megatron's own router takes it, and checks less")
@pytest.mark.parametrize(
    "mask, words",
    [
        (torch.zeros(B, S, dtype=torch.bool), r"has the shape \[3, 5\]: expected \[5, 3\]"),
        (torch.zeros(T - 1, dtype=torch.bool), r"has the shape \[14\]: expected \[5, 3\]"),
        (torch.zeros(S, B), "is torch.float32: expected a bool tensor"),
        ([[False] * B] * S, "is list: expected a bool tensor"),
    ],
)
def test_what_is_no_mask_of_these_rows_is_refused(mask: Any, words: str) -> None:
    router = make_router()

    with pytest.raises(LayoutError, match=words):
        router(hidden_states(), padding_mask=mask)


def test_a_mask_may_be_flat() -> None:
    router, hidden, mask = make_router("aux_loss"), hidden_states(), ragged_mask()

    as_2d, flat = (run(router, hidden, padding_mask=m) for m in (mask, mask.flatten()))

    assert torch.equal(as_2d["weight gradient"], flat["weight gradient"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    router = make_router("aux_loss", **SIGMOID_BIAS, params_dtype=torch.bfloat16, bf16=True)
    if dtype is torch.float64:
        router.config.moe_router_dtype = "fp64"

    found = run(router, hidden_states().bfloat16(), padding_mask=ragged_mask())
    plain = run(router, hidden_states().bfloat16())

    assert found["probs"].dtype == plain["probs"].dtype
    assert found["weight gradient"].isfinite().all()
    assert found["weight gradient"].shape == (E, H)
