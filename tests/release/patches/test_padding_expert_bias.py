"""The shim of `_apply_expert_bias`: where a probe shows the fault, and only there (case 25)."""

from types import SimpleNamespace
from typing import Any

import megatron.core.transformer.moe.router as router_module
import pytest
import torch
from helpers.padding_cases import SIGMOID_BIAS, E, K, hidden_states, make_router, ragged_mask
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

import replay_patch
from replay_patch.patches.megatron import expert_bias_mask
from replay_patch.patching.ledger import Ledger
from replay_patch.patching.patch import ACTIVE, FAILED, NOT_NEEDED
from replay_patch.settings import Settings

HAS_IT = hasattr(TopKRouter, "_apply_expert_bias")
only_there = pytest.mark.skipif(not HAS_IT, reason="this release counts inside of its routing")


def faulty(self: Any, routing_map: Tensor, padding_mask: Any = None) -> None:
    """0.16 ... 0.19."""
    if self.enable_expert_bias and torch.is_grad_enabled():
        with torch.no_grad():
            if padding_mask is not None:
                routing_map = routing_map & (~padding_mask)
            self.local_tokens_per_expert += routing_map.sum(dim=0)


def right(self: Any, routing_map: Tensor, padding_mask: Any = None) -> None:
    """Megatron's main since 723db5a727."""
    if self.enable_expert_bias and torch.is_grad_enabled():
        with torch.no_grad():
            if padding_mask is not None:
                routing_map = routing_map & (~padding_mask).unsqueeze(-1)
            self.local_tokens_per_expert += routing_map.sum(dim=0)


def unknown(self: Any, routing_map: Tensor, padding_mask: Any = None) -> None:
    """Counts padding whatever the mask."""
    self.local_tokens_per_expert += routing_map.sum(dim=0)


def unmasked(self: Any, routing_map: Tensor) -> None:
    """Of a release that has no mask."""


def state_with(function: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """What our patch becomes on a Megatron that has this function, and what then stands there."""
    stand_in = type("TopKRouter", (), {"_apply_expert_bias": function})
    monkeypatch.setattr(router_module, "TopKRouter", stand_in)
    ledger = Ledger((expert_bias_mask.PATCH,), Settings())
    ledger.apply_if_needed("expert_bias_mask")
    [state] = ledger.states()
    assert (vars(stand_in)["_apply_expert_bias"] is function) is (state.state != ACTIVE)
    return state.state, state.reason


@pytest.mark.parametrize(
    "function, state, reason",
    [
        (faulty, ACTIVE, "it raises The size of tensor a (3) must match"),
        (right, NOT_NEEDED, "is applied to tokens"),
        (unknown, FAILED, "is not the function that we know"),
        (unmasked, NOT_NEEDED, "takes no padding_mask"),
        (torch.compile(faulty, backend="eager"), ACTIVE, "it raises"),
        (torch.compile(right, backend="eager"), NOT_NEEDED, "is applied to tokens"),
    ],
)
def test_the_probe_tells_a_faulty_megatron_from_a_right_one(
    function: Any, state: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, words = state_with(function, monkeypatch)

    assert found == state
    assert reason in words


def test_this_release_is_right_or_mended() -> None:
    [found] = [p for p in replay_patch.status().patches if p.name == "expert_bias_mask"]

    assert found.state == (ACTIVE if HAS_IT else NOT_NEEDED)


@only_there
@pytest.mark.parametrize("tokens", [1, 2, 4, 10])
@pytest.mark.parametrize("wide", [False, True])
def test_masked_tokens_are_not_counted(tokens: int, wide: bool) -> None:
    """Four experts: with four tokens the fault has no error and masks experts."""
    router = make_router(num_moe_experts=4, **SIGMOID_BIAS)
    chosen = torch.rand(tokens, 4) > 0.5
    for masked in range(tokens + 1):
        mask = torch.arange(tokens) < masked
        router.local_tokens_per_expert.zero_()

        router._apply_expert_bias(chosen, padding_mask=mask.unsqueeze(1) if wide else mask)

        assert torch.equal(router.local_tokens_per_expert, chosen[masked:].sum(0).float())


@only_there
def test_four_tokens_of_four_experts() -> None:
    """Case 25: Megatron's own counts sum up to 7."""
    router = make_router(num_moe_experts=4, **SIGMOID_BIAS)
    mask = torch.tensor([[False], [False], [False], [True]])

    _, routing_map = router(hidden_states(4, 1), padding_mask=mask)

    assert router.local_tokens_per_expert.sum() == 6
    assert torch.equal(router.local_tokens_per_expert, routing_map[:3].sum(0).float())


@only_there
def test_no_mask_is_the_original_call() -> None:
    calls: list[Any] = []
    original = SimpleNamespace(
        enable_expert_bias=True, local_tokens_per_expert=torch.zeros(E), calls=calls
    )
    chosen = torch.rand(5, E) > 0.5

    TopKRouter._apply_expert_bias(original, chosen)
    TopKRouter._apply_expert_bias(original, routing_map=chosen, padding_mask=None)

    assert torch.equal(original.local_tokens_per_expert, 2 * chosen.sum(0).float())


@pytest.mark.parametrize("compiled", [False, True])
def test_counts_under_torch_compile(compiled: bool) -> None:
    """As Megatron's `jit_fuser` compiles them; its real backend is in test_compile."""
    torch._dynamo.reset()
    router, mask = make_router(**SIGMOID_BIAS), ragged_mask()
    function = torch.compile(router, backend="eager") if compiled else router

    for seed in range(3):
        _, routing_map = function(hidden_states(seed=seed), padding_mask=mask)
        assert torch.equal(
            router.local_tokens_per_expert, routing_map[~mask.flatten()].sum(0).float()
        )
        assert router.local_tokens_per_expert.sum() == K * (~mask).sum()
        router.local_tokens_per_expert.zero_()
