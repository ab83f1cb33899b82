"""Targets on a device are checked without waiting for it, and reported when they are cleared.

There is no device here: `_on_host` is answered as if the host tensors were on one, so that the
same code runs, and the operations that would wait are counted.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.router_replay import RouterReplayAction
from torch.utils._python_dispatch import TorchDispatchMode

import replay_patch
from replay_patch.matrix import tiny
from replay_patch.patching import activation
from replay_patch.replay import target_ids

WAITS = {"_local_scalar_dense", "nonzero", "item", "is_nonzero", "equal"}


class Waiting(TorchDispatchMode):
    """Counts operations for which the host waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        indices = args[1] if name == "index" else ()
        if name in WAITS or any(i is not None and i.dtype is torch.bool for i in indices):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    config = tiny.moe_config(
        enable_routing_replay=True,
        num_moe_experts=8,
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
    )
    built = tiny.router(config)
    monkeypatch.setattr(target_ids, "on_host", lambda tensor: False)
    return built


def replayed(router: Any, hidden: torch.Tensor, ids: list[list[int]]) -> torch.Tensor:
    """The routing map [tokens, experts] of a forward that replays `ids`."""
    router.router_replay.set_target_indices(torch.tensor(ids))
    router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    routing_map: torch.Tensor = router(hidden)[1]
    return routing_map


def test_valid_ids_are_replayed_and_nothing_waits(router: Any) -> None:
    ids = [[7, 1], [0, 5], [3, 2]]

    with Waiting() as mode:
        routing_map = replayed(router, torch.randn(3, 1, 16), ids)

    assert mode.seen == []
    assert [sorted(row.nonzero().flatten().tolist()) for row in routing_map] == [
        sorted(row) for row in ids
    ]
    router.router_replay.clear_indices()


def test_ids_out_of_range_are_raised_when_they_are_cleared(router: Any) -> None:
    with Waiting() as mode:
        replayed(router, torch.randn(3, 1, 16), [[7, 1], [0, 8], [3, 2]])

    assert mode.seen == []
    with pytest.raises(replay_patch.RouteError, match=r"router of layer 1.*out of range"):
        router.router_replay.clear_indices()
    assert router.router_replay.target_topk_idx is None
    router.router_replay.clear_indices()  # reported once


def test_one_bad_layer_leaves_no_layer_uncleared(router: Any) -> None:
    other = tiny.router(router.config, layer_number=2)
    hidden = torch.randn(3, 1, 16)
    replayed(router, hidden, [[7, 1], [0, 8], [3, 2]])
    replayed(other, hidden, [[7, 1], [0, 5], [3, 2]])
    cls = type(router.router_replay)

    with pytest.raises(replay_patch.RouteError, match="layer 1"):
        cls.clear_global_indices()

    assert [r.router_replay.target_topk_idx for r in (router, other)] == [None, None]


def test_rows_that_repeat_an_expert_route_natively(router: Any) -> None:
    hidden = torch.randn(3, 1, 16)
    native = router(hidden)[1]

    with Waiting() as mode:
        routing_map = replayed(router, hidden, [[7, 1], [0, 0], [3, 2]])

    assert mode.seen == []
    assert torch.equal(routing_map[1], native[1])
    assert routing_map.sum(dim=1).tolist() == [2, 2, 2]
    router.router_replay.clear_indices()


def test_strict_raises_for_them_when_they_are_cleared(router: Any) -> None:
    activation.activate(strict=True)
    try:
        replayed(router, torch.randn(3, 1, 16), [[7, 1], [0, 0], [3, 2]])
        with pytest.raises(replay_patch.RouteError, match="repeated in a row"):
            router.router_replay.clear_indices()
    finally:
        activation.activate(strict=False)
