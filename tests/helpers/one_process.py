"""Sessions in one process: a tiny model, its routes, and what its routers did."""

import gc
from collections.abc import Callable
from typing import Any

import torch
from helpers import schedules, sessions
from helpers.schedules import LAYERS, LENGTH, ONE_PROCESS, WIDTH
from helpers.sessions import Call, E, K
from torch import Tensor

from replay_patch import Routes, TokenLayout
from replay_patch.matrix import tiny
from replay_patch.matrix.ranks import launch

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def alone(test: Callable[[], None]) -> Callable[[], None]:
    """Run the test in a process with process groups of its own."""

    def rank(rank: int, world: int, init_file: str) -> None:
        tiny.init(world, rank, init_file)
        gc.freeze()  # what was there before is no garbage: collecting takes no time
        test()

    rank.__name__ = test.__name__

    def run() -> None:
        launch(rank, 1)

    run.__name__ = test.__name__
    return run


def build(**options: Any) -> Any:
    [model] = schedules.build(ONE_PROCESS, **sessions.OPTIONS | options)
    return model


def layout() -> TokenLayout:
    return TokenLayout.padded([LENGTH] * WIDTH, LENGTH)


def whole_routes(seed: int = 0, captured: Any = None) -> list[Routes]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(WIDTH, LENGTH, LAYERS, E, generator=generator).argsort(dim=3)
    return [Routes(one[..., :K], E, captured=captured) for one in ids]


def logits_of(model: Any, seed: int = 0, **more: Any) -> Any:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, tiny.VOCAB_SIZE, (WIDTH, LENGTH), generator=generator)
    return model(tokens, sessions.positions(), None, **more)


def given_map(routes: list[Routes], layer: int) -> Tensor:
    """bool [R, E] in the order of router rows."""
    ids = torch.stack([one.expert_ids[:, layer - 1].long() for one in routes], dim=1)
    return torch.zeros(LENGTH * WIDTH, E).bool().scatter(1, ids.flatten(0, 1), True)


def replayed(calls: list[Call], routes: list[Routes]) -> bool:
    return all(torch.equal(call.map, given_map(routes, call.layer)) for call in calls)
