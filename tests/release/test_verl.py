"""verl's routing replay, each release of it with its own code, on Megatron's routers.

verl's modules are the real ones; packages above them are empty (see `helpers.peers`). Each release
has a process of its own, in which one script asks everything.
"""

import functools
from pathlib import Path
from typing import Any

import pytest
from helpers import fresh

RELEASES = ("0.7.0", "0.7.1", "0.8.0", "0.9.1")
TESTS = Path(__file__).parents[1]

pytestmark = pytest.mark.mechanism

BEGIN = f"""
import json, sys
sys.path.insert(0, {str(TESTS)!r})
from helpers import peers
peers.VERSIONS["verl"] = VERL
from replay_patch.matrix import cpu, tiny
cpu.install()
import megatron.core
cpu.patch_megatron()
tiny.init()
import torch
from megatron.core.transformer.moe.router import TopKRouter
patch = peers.verl("utils.megatron.router_replay_patch")
before = {{name: vars(TopKRouter).get(name) for name in ("__init__", "routing", "forward")}}
patch.apply_router_replay_patch()
R, A = patch.RouterReplay, patch.RouterReplayAction
LOSS = {{"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01}}

def unchanged():
    return all(before[name] is vars(TopKRouter)[name] for name in before)

def new_router(number=1):
    return tiny.router(tiny.moe_config(enable_routing_replay=True, **LOSS), number).train()

def call(router):
    generator = torch.Generator().manual_seed(1)
    probs, routing_map = router(torch.randn(6, 2, 16, generator=generator, requires_grad=True))
    probs.sum().backward()
    return routing_map

def other_ids(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(12, 4, generator=generator).argsort(1)[:, :2].contiguous()

def are(given, maps):
    made = [torch.zeros(12, 4, dtype=torch.bool).scatter(1, ids, True) for ids in given]
    return [torch.equal(*pair) for pair in zip(made, maps)]
"""

WITHOUT = """
try:
    call(new_router())
except Exception as error:
    print(json.dumps(["fails", type(error).__name__]))
else:
    print(json.dumps(["replaced", not unchanged()]))
"""

WITH = """
def names_record_and_replay():
    routers = [new_router(number) for number in (1, 2)]
    R.set_global_router_replay_action(A.RECORD)
    maps = [call(router) for router in routers]
    out = {"recorded": are(R.get_recorded_data(), maps)}
    R.clear_global_indices()
    given = [other_ids(1), other_ids(2)]
    R.set_replay_data(given)
    for action in (A.REPLAY_FORWARD, A.REPLAY_BACKWARD):
        R.set_global_router_replay_action(action)
        out[action.value] = are(given, [call(router) for router in routers])
    R.clear_global_indices()
    R.clear_global_router_replay_action()
    return out | {"listed": len(R.router_instances)}

def masked_rows():
    router = new_router()
    native = call(router)
    ids, mask = other_ids(1), torch.arange(12) % 3 > 0
    wanted = torch.zeros(12, 4, dtype=torch.bool).scatter(1, ids, True)
    ids[~mask] = -1
    router.router_replay.set_target_indices(ids, replay_mask=mask)
    out = []
    for action in (A.REPLAY_FORWARD, A.REPLAY_BACKWARD):
        router.router_replay.set_router_replay_action(action)
        found = call(router)
        out += [torch.equal(found[mask], wanted[mask]), torch.equal(found[~mask], native[~mask])]
    return out

def routers_of_a_stage():
    options = {"enable_routing_replay": True, "num_layers": 4, "moe_layer_freq": [0, 0, 1, 1]}
    config = tiny.moe_config(mtp_num_layers=1, **options)
    model = tiny.gpt_model(config)
    ask = utils.RouterReplayHelper.get_micro_batch_router_list
    out = {"one model": [(e.layer_number, e.mtp_depth) for e in ask(config)]}
    out["listed"] = len(R.router_instances)
    rows = torch.tensor([[0, 1], [1, 2], [2, 3]])
    for layers in ([1, 2, 3, 4], [3, 4]):
        routes = torch.stack([(rows + layer) % 4 for layer in layers], dim=1)[None]
        utils.set_router_replay_data(routes, torch.ones(1, 3, dtype=torch.bool), config)
        got = [(e.layer_number, e.target_topk_idx[:3]) for e in ask(config)]
        expected = [(rows + number) % 4 for number, _ in got]
        out[f"{len(layers)} layers"] = [torch.equal(e, g[1]) for e, g in zip(expected, got)]
    other = tiny.gpt_model(config)
    try:
        out["two models"] = len(ask(config))
    except Exception as error:
        out["two models"] = f"{type(error).__name__}: {error}"
    return out

utils = peers.verl("utils.megatron.router_replay_utils")
import gc
answers = {"names": names_record_and_replay(), "unchanged": unchanged()}
gc.collect()
answers["mask"] = masked_rows()
gc.collect()
answers["stage"] = routers_of_a_stage()
print(json.dumps(answers))
"""


@functools.cache
def ask(verl: str, script: str, plugin: bool) -> Any:
    env = {"REPLAY_PATCH": "1"} if plugin else {}
    return fresh.run(f"VERL = {verl!r}\n{BEGIN}{script}", **env)


@pytest.fixture(params=RELEASES)
def answers(request: pytest.FixtureRequest) -> Any:
    return ask(request.param, WITH, plugin=True)


@pytest.mark.parametrize("verl", RELEASES)
def test_without_the_plugin_its_patch_replaces_the_routing_or_fails(verl: str) -> None:
    """What the patch is for."""
    found = ask(verl, WITHOUT, plugin=False)

    assert found[0] == "fails" or found == ["replaced", True]


def test_its_names_record_and_replay(answers: Any) -> None:
    both = [True, True]
    names = {"recorded": both, "replay_forward": both, "replay_backward": both, "listed": 2}

    assert answers["names"] == names
    assert answers["unchanged"]


def test_rows_that_are_not_to_be_replayed_are_native(answers: Any) -> None:
    assert answers["mask"] == [True] * 4


def test_routers_of_a_stage_are_by_layer_and_refused_for_two_models(answers: Any) -> None:
    """Dense layers in front, an MTP block behind; routes of all layers, and of the MoE layers."""
    found = answers["stage"]
    refusal = found.pop("two models")

    both = [True, True]
    expected = {"one model": [[3, 0], [4, 0]], "listed": 3, "4 layers": both, "2 layers": both}
    assert found == expected
    assert refusal.startswith("RouteError")
    assert "{3: 2, 4: 2}" in refusal
