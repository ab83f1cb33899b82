"""The examples under docs/examples/ run, and do what they say."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from replay_patch.matrix import tiny

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"
TOKENS = torch.arange(16).reshape(2, 8)
POSITIONS = torch.arange(8).expand(2, -1)
RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


@pytest.fixture
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("e", EXAMPLES / "trainer_with_router_replay.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def model(**options: Any) -> Any:
    tiny.clear_aux_tracker()
    config = tiny.moe_config(moe_enable_routing_replay=True, **options)
    return tiny.gpt_model(config)


def losses(model: Any, tokens: Any = TOKENS) -> Any:
    return model(tokens, POSITIONS, None, labels=tokens).float().mean()


def chosen(model: Any) -> list[Any]:
    """The maps of all router calls from now on."""
    from megatron.core.transformer.moe.router import TopKRouter

    maps: list[Any] = []
    for router in model.modules():
        if isinstance(router, TopKRouter):
            router.register_forward_hook(lambda router, _, output: maps.append(output[1]))
    return maps


def other_ids(seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(TOKENS.numel(), 4, generator=generator).argsort(1)[:, :2].contiguous()


def as_map(ids: Any) -> Any:
    return torch.zeros(len(ids), 4, dtype=torch.bool).scatter(1, ids, True)


def gradients(model: Any) -> list[Any]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_what_it_records_is_what_the_routers_chose(example: ModuleType) -> None:
    trained = model()
    maps = chosen(trained)

    recorded = example.record(lambda: losses(trained))

    assert len(recorded) == len(maps) == 2
    for ids, routing_map in zip(recorded, maps, strict=True):
        assert torch.equal(as_map(ids), routing_map)


@pytest.mark.parametrize("options", [{}, RECOMPUTE], ids=["plain", "recompute"])
def test_a_step_takes_the_given_experts(example: ModuleType, options: dict[str, Any]) -> None:
    trained, given = model(**options), [other_ids(1), other_ids(2)]
    maps = chosen(trained)

    example.replay_step(given, lambda: losses(trained))

    expected = [0, 1] if not options else [0, 1, 1, 0]  # the recompute begins at the end
    assert len(maps) == len(expected)
    for layer, routing_map in zip(expected, maps, strict=True):
        assert torch.equal(as_map(given[layer]), routing_map)


def test_queues_feed_microbatches_and_their_recomputes(example: ModuleType) -> None:
    given = [[other_ids(10 * m + layer) for layer in range(2)] for m in range(3)]
    found = []
    for options in ({}, RECOMPUTE):
        trained = model(**options)
        maps = chosen(trained)
        with example.RouteQueues(trained, given) as queues:
            values = [losses(trained, (TOKENS + m) % 64) for m in range(3)]
            wanted = [as_map(ids) for routes in given for ids in routes]
            assert all(map(torch.equal, wanted, maps))
            queues.act(example.RouterReplayAction.REPLAY_BACKWARD)
            for value in values:
                value.backward()
        found.append(gradients(trained))
    for plain, recomputed in zip(*found, strict=True):
        assert torch.equal(plain, recomputed)


def test_the_example_does_not_know_the_plugin(example: ModuleType) -> None:
    assert example.__file__ is not None
    code = Path(example.__file__).read_text().partition('"""\n\n')[2]

    assert "replay_patch" not in code


def test_the_readmes_example_replays_what_it_recorded() -> None:
    text = (ROOT / "README.md").read_text()
    [example] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    trained = model(**RECOMPUTE)
    names = {"model": trained, "tokens": TOKENS, "positions": POSITIONS}
    names |= {"labels": TOKENS.roll(-1, 1), "lengths": [8, 5]}

    exec(compile(example, "README.md", "exec"), names)

    assert [routes.num_tokens for routes in names["routes"]] == [8, 5]
    assert (names["replay"].report.replayed, names["replay"].report.padding) == (2 * 13, 2 * 3)
    assert all(grad.isfinite().all() for grad in gradients(trained))
