"""Arguments that a release's router takes and we do not know are passed on (case 9)."""

import inspect
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplayAction

from replay_patch.matrix import tiny

TAKES_MASK = "padding_mask" in inspect.signature(TopKRouter.forward).parameters


def run(router: Any, hidden: torch.Tensor, **kwargs: Any) -> list[torch.Tensor]:
    """Outputs and gradients, losses included."""
    router.zero_grad()
    probs, routing_map = router(hidden, **kwargs)
    (probs * torch.linspace(0, 1, probs.numel()).reshape(probs.shape)).sum().backward()
    return [probs, routing_map, router.weight.grad.clone()]


@pytest.fixture
def router() -> Any:
    return tiny.router(tiny.moe_config(enable_routing_replay=True, moe_z_loss_coeff=1e-2))


@pytest.fixture
def hidden() -> torch.Tensor:
    return torch.randn(6, 2, 16)


@pytest.mark.skipif(not TAKES_MASK, reason="this release's router takes no padding_mask")
def test_a_padding_mask_counts_under_replay_as_without(router: Any, hidden: torch.Tensor) -> None:
    mask = torch.zeros(6, 2, dtype=torch.bool)
    mask[4:] = True
    router.router_replay.set_router_replay_action(RouterReplayAction.RECORD)
    native = run(router, hidden, padding_mask=mask)
    unmasked = run(router, hidden)

    router.router_replay.set_target_indices(router.router_replay.get_recorded_indices())
    router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    replayed = run(router, hidden, padding_mask=mask)

    assert all(map(torch.equal, replayed, native))
    assert not torch.equal(native[2], unmasked[2])  # the mask does something


@pytest.mark.skipif(TAKES_MASK, reason="this release's router takes a padding_mask")
@pytest.mark.parametrize("action", [None, RouterReplayAction.RECORD])
def test_an_argument_that_the_release_lacks_is_its_own_error(
    router: Any, hidden: torch.Tensor, action: Any
) -> None:
    if action is not None:
        router.router_replay.set_router_replay_action(action)

    with pytest.raises(TypeError, match="unexpected keyword argument 'padding_mask'"):
        router(hidden, padding_mask=torch.zeros(6, 2, dtype=torch.bool))
