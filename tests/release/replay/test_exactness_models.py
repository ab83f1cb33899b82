"""Replay is exact in whole models, with recomputes in the backward pass."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.exactness import differing, gradients
from helpers.routers import BACKWARD, FORWARD, RECORD
from megatron.core.transformer.moe.router_replay import RouterReplay
from torch import Tensor

from replay_patch.matrix import tiny

RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "moe layer": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}
LENGTH, MICROBATCHES = 8, 3


def make_model(recompute: str, **options: Any) -> Any:
    config = tiny.moe_config(enable_routing_replay=True, **RECOMPUTE[recompute] | options)
    return tiny.gpt_model(config)


def model_loss(model: Any, microbatch: int) -> Tensor:
    draw = torch.Generator().manual_seed(microbatch)
    tokens = torch.randint(0, tiny.VOCAB_SIZE, (2, LENGTH), generator=draw)
    positions = torch.arange(LENGTH).expand(2, LENGTH)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    return model(tokens, positions, mask, labels=tokens.roll(-1, 1)).float().mean()


def train_step(
    model: Any,
    before_forward: Callable[[int], None] = lambda microbatch: None,
    before_backward: Callable[[], None] = lambda: None,
) -> dict[str, Tensor]:
    """One step in the order of a pipeline stage: F0 F1 B0 F2 B1 B2."""
    model.zero_grad(set_to_none=True)
    losses: dict[int, Tensor] = {}

    def forward(microbatch: int) -> None:
        before_forward(microbatch)
        losses[microbatch] = model_loss(model, microbatch)

    def backward(microbatch: int) -> None:
        before_backward()
        losses[microbatch].backward()

    forward(0)
    for later in range(1, MICROBATCHES):
        forward(later)
        backward(later - 1)
    backward(MICROBATCHES - 1)
    return {f"loss {i}": value.detach() for i, value in losses.items()} | gradients(model)


def replaying_step(model: Any, routes: list[list[Tensor]]) -> dict[str, Tensor]:
    """As a trainer does it: set the targets of a microbatch, forward; switch over, backward."""

    def before_forward(microbatch: int) -> None:
        RouterReplay.set_replay_data(routes[microbatch])
        RouterReplay.set_global_router_replay_action(FORWARD)

    def before_backward() -> None:
        RouterReplay.set_global_router_replay_action(BACKWARD)

    return train_step(model, before_forward, before_backward)


@pytest.mark.parametrize("topk", [1, 2])
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_a_model_with_its_own_ids_is_native_bitwise(recompute: str, topk: int) -> None:
    model = make_model(
        recompute, moe_router_topk=topk, moe_router_pre_softmax=topk == 1, moe_z_loss_coeff=0.1
    )
    native = train_step(model)
    RouterReplay.set_global_router_replay_action(RECORD)
    routes = []
    with torch.no_grad():  # the trainer's own pass under the old policy
        for microbatch in range(MICROBATCHES):
            model_loss(model, microbatch)
            routes.append(RouterReplay.get_recorded_data())

    replayed = replaying_step(model, routes)
    left = [len(r.replay_backward_list) for r in RouterReplay.global_router_replay_instances]
    RouterReplay.clear_global_indices()
    RouterReplay.clear_global_router_replay_action()

    assert differing(native, replayed) == []
    assert differing(native, train_step(model)) == []
    assert [MICROBATCHES * (recompute == "none")] * 2 == left


@pytest.mark.parametrize("recompute", [name for name in RECOMPUTE if name != "none"])
def test_a_recompute_sees_the_same_other_ids(recompute: str) -> None:
    plain, recomputing = make_model("none"), make_model(recompute)
    tokens = 2 * LENGTH
    rows = [
        [torch.rand(tokens, 4).argsort(1)[:, :2] for _ in range(2)] for _ in range(MICROBATCHES)
    ]
    first, second = (RouterReplay.global_router_replay_instances[i : i + 2] for i in (0, 2))

    RouterReplay.global_router_replay_instances[:] = first
    expected = replaying_step(plain, rows)
    RouterReplay.global_router_replay_instances[:] = second
    actual = replaying_step(recomputing, rows)

    assert differing(expected, actual) == []
