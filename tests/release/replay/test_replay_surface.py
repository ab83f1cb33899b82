"""The surface of RouterReplay is that of 0.19, on every release."""

import enum
import inspect

import megatron.core.transformer.moe.router_replay as router_replay_module
import pytest
import torch
from helpers.routers import FORWARD, RECORD, E, K, T, make_router, some_ids, top
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

STATIC_METHODS = {
    "set_replay_data": ["all_layers_topk_indices"],
    "get_recorded_data": [],
    "clear_global_indices": [],
    "set_global_router_replay_action": ["router_replay_action"],
    "clear_global_router_replay_action": [],
    "clear_global_router_replay_instances": [],
    "set_global_static_buffers": ["static_buffer"],
    "clear_global_static_buffers": [],
}
METHODS = {
    "__init__": [],
    "set_target_indices": ["topk_indices"],
    "get_recorded_indices": [],
    "clear_indices": [],
    "set_router_replay_action": ["router_replay_action"],
    "clear_router_replay_action": [],
    "get_replay_topk": ["scores", "topk", "num_groups", "group_topk", "default_compute_topk"],
    "set_static_buffer": ["buffer"],
    "clear_static_buffer": [],
    "record_indices": ["topk_indices"],
}
ATTRIBUTES = {
    "target_topk_idx": None,
    "recorded_topk_idx": None,
    "router_replay_action": None,
    "replay_backward_list": [],
    "static_buffer": None,
    "layer_number": None,
    "mtp_depth": 0,
}


@pytest.mark.parametrize("name", STATIC_METHODS)
def test_static_method_of_0_19(name: str) -> None:
    assert isinstance(vars(RouterReplay)[name], staticmethod)
    assert STATIC_METHODS[name] == list(inspect.signature(getattr(RouterReplay, name)).parameters)


@pytest.mark.parametrize("name", METHODS)
def test_method_of_0_19(name: str) -> None:
    parameters = inspect.signature(vars(RouterReplay)[name]).parameters

    assert ["self", *METHODS[name]] == list(parameters)
    optional = METHODS[name][2:] if name == "get_replay_topk" else []
    assert optional == [n for n, p in parameters.items() if p.default is not p.empty]


def test_a_new_replay_object_has_the_attributes_of_0_19() -> None:
    replay = RouterReplay()

    assert {name: getattr(replay, name) for name in ATTRIBUTES} == ATTRIBUTES
    assert [replay] == RouterReplay.global_router_replay_instances
    assert type(RouterReplay.global_router_replay_instances) is list


def test_the_actions_of_0_19() -> None:
    assert issubclass(RouterReplayAction, enum.Enum)
    assert {action.name: action.value for action in RouterReplayAction} == {
        "RECORD": "record",
        "REPLAY_FORWARD": "replay_forward",
        "REPLAY_BACKWARD": "replay_backward",
    }


def test_the_module_answers_unknown_names_as_a_module_does() -> None:
    assert not hasattr(router_replay_module, "no_such_name")
    assert router_replay_module.__name__ == "megatron.core.transformer.moe.router_replay"


def test_methods_take_their_arguments_by_name() -> None:
    router = make_router()
    replay, ids = router.router_replay, some_ids()

    replay.set_router_replay_action(router_replay_action=FORWARD)
    replay.set_target_indices(topk_indices=ids)
    scores = torch.rand(T, E)
    values, chosen = replay.get_replay_topk(scores=scores, topk=K, default_compute_topk=top)
    RouterReplay.set_replay_data(all_layers_topk_indices=[ids])

    assert torch.equal(ids, chosen)
    assert torch.equal(scores.gather(1, ids), values)


def test_a_replay_object_without_a_router_works() -> None:
    """As Megatron's own tests use it."""
    replay, scores = RouterReplay(), torch.rand(T, E)

    native = replay.get_replay_topk(scores, K, None, None, top)
    replay.set_router_replay_action(RECORD)
    replay.get_replay_topk(scores, K, None, None, top)
    recorded = replay.get_recorded_indices()
    replay.set_target_indices(recorded.flip(1))
    replay.set_router_replay_action(FORWARD)
    values, ids = replay.get_replay_topk(scores, K, None, None, top)

    assert torch.equal(native[1], recorded)
    assert torch.equal(native[1].flip(1), ids)
    assert torch.equal(native[0].flip(1), values)
