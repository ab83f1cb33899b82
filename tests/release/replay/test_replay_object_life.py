"""The list of replay objects, and what happens to them with their routers."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.routers import FORWARD, RECORD, as_map, hidden_states, make_router, some_ids
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay
from megatron.core.transformer.transformer_block import TransformerBlock

from replay_patch.matrix import tiny


def test_the_list_is_in_build_order_and_shrinks_when_a_router_dies() -> None:
    routers = [make_router(number) for number in (1, 2, 3)]
    entries = [router.router_replay for router in routers]
    listed = RouterReplay.global_router_replay_instances
    assert entries == listed

    del routers[1]
    gc.collect()
    assert [entries[0], entries[2]] == listed

    del routers
    gc.collect()
    assert listed == []
    assert listed is RouterReplay.global_router_replay_instances


def test_a_list_that_a_caller_replaced_shrinks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    routers = [make_router(number) for number in (1, 2)]
    kept = routers[1].router_replay
    replaced = list(RouterReplay.global_router_replay_instances)
    monkeypatch.setattr(RouterReplay, "global_router_replay_instances", replaced)

    del routers[0]
    gc.collect()

    assert [kept] == replaced


def test_an_entry_keeps_no_router_alive() -> None:
    router = make_router()
    replay, alive = router.router_replay, weakref.ref(router)
    replay.set_router_replay_action(RECORD)
    router(hidden_states())

    del router
    gc.collect()

    assert alive() is None
    assert replay.get_recorded_indices() is not None


class Twice(GPTModel):
    """As Qwen3-VL of Megatron-Bridge and of later mbridge."""

    def __init__(self, config: Any, transformer_layer_spec: Any, **kwargs: Any) -> None:
        super().__init__(config, transformer_layer_spec, **kwargs)
        self.decoder = TransformerBlock(config, transformer_layer_spec)


def test_a_model_that_builds_its_decoder_twice_lists_the_routers_that_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At once: nothing waits for the garbage collector."""
    monkeypatch.setattr("megatron.core.models.gpt.GPTModel", Twice)
    gc.collect()
    gc.disable()
    try:
        model = tiny.gpt_model(tiny.moe_config(enable_routing_replay=True))
        listed = list(RouterReplay.global_router_replay_instances)
    finally:
        gc.enable()

    running = [m.router_replay for m in model.modules() if isinstance(m, TopKRouter)]
    assert isinstance(model, Twice)
    assert running == listed


def test_a_copied_router_has_a_replay_object_of_its_own() -> None:
    router = make_router()
    router.router_replay.set_target_indices(some_ids())
    twin = without_groups(router, copy.deepcopy)
    twin.router_replay.set_router_replay_action(RECORD)

    twin(hidden_states())

    assert twin.router_replay is not router.router_replay
    assert twin.router_replay.layer_number == 3
    assert twin.router_replay.get_recorded_indices() is not None
    assert router.router_replay.get_recorded_indices() is None
    assert router.router_replay.router_replay_action is None


def test_a_router_survives_pickling() -> None:
    router = make_router()
    ids = some_ids()
    router.router_replay.set_target_indices(ids)

    twin = without_groups(router, lambda r: pickle.loads(pickle.dumps(r)))
    twin.router_replay.set_router_replay_action(FORWARD)

    assert torch.equal(as_map(ids), twin(hidden_states())[1])


def without_groups(router: Any, function: Callable[[Any], Any]) -> Any:
    """`function` of a router whose process groups, which nothing can copy, are set aside."""
    group_class = torch.distributed.ProcessGroup
    groups = {name: g for name, g in vars(router).items() if isinstance(g, group_class)}
    vars(router).update(dict.fromkeys(groups))
    try:
        made = function(router)
    finally:
        vars(router).update(groups)
    vars(made).update(groups)
    return made
