"""Arguments that a release's router takes and we do not know are passed on (case 9)."""

from typing import Any

import pytest
import torch
from helpers.routers import BACKWARD, FORWARD, RECORD, B, S, hidden_states, make_router
from megatron.core.transformer.moe.router_replay import RouterReplayAction
from torch import Tensor


def test_a_padding_mask_still_reaches_the_losses() -> None:
    losses = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
    router = make_router(1, moe_z_loss_coeff=0.1, **losses)
    replay, mask = router.router_replay, torch.zeros(S, B, dtype=torch.bool)
    mask[-1] = True

    def run(action: RouterReplayAction | None, **kwargs: Any) -> list[Tensor]:
        router.zero_grad()
        replay.router_replay_action = action
        probs, routing_map = router(hidden_states(), **kwargs)
        probs.square().sum().backward()
        return [probs, routing_map, router.weight.grad.clone()]

    native = run(None, padding_mask=mask)
    assert not torch.equal(native[2], run(None)[2])  # the mask does something
    recording = run(RECORD, padding_mask=mask)
    replay.set_target_indices(replay.get_recorded_indices())
    forward, recompute = run(FORWARD, padding_mask=mask), run(BACKWARD, padding_mask=mask)

    for what in (recording, forward, recompute):
        assert all(map(torch.equal, native, what))


@pytest.mark.parametrize("action", [None, RECORD])
def test_an_argument_that_the_release_lacks_is_its_own_error(action: Any) -> None:
    router = make_router()
    if action is not None:
        router.router_replay.set_router_replay_action(action)

    with pytest.raises(TypeError, match="unexpected keyword argument 'no_mask'"):
        router(hidden_states(), no_mask=torch.zeros(S, B, dtype=torch.bool))
