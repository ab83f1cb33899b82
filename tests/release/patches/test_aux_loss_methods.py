"""The auxiliary-loss methods of newer releases, on every release."""

import inspect
import types

import megatron.core.transformer.moe.router as router_module
import pytest
from helpers.routers import make_router
from megatron.core.transformer.moe.router import TopKRouter

OLD_KINDS = {
    "none": ("none", 0.3, {}),
    "aux": ("aux_loss", 0.3, {"aux_loss": 0.3}),
    "sequence": ("seq_aux_loss", 0.3, {"seq_aux_loss": 0.3}),
    "sinkhorn": ("sinkhorn", 0.0, {}),
    "zero": ("aux_loss", 0.0, {}),
    "integer zero": ("aux_loss", 0, {}),
    "list": (["aux_loss", "seq_aux_loss"], [0.3, 0.2], {"aux_loss": 0.3, "seq_aux_loss": 0.2}),
    "list with zero": (["aux_loss", "seq_aux_loss"], [0.0, 0.2], {"seq_aux_loss": 0.2}),
    "list of zeros": (["aux_loss"], [0.0], {}),
}
METHOD_NAMES = ("is_aux_loss_enabled", "get_aux_loss_coeff")


@pytest.mark.parametrize("replay", [True, False])
@pytest.mark.parametrize("kind", OLD_KINDS)
def test_aux_loss_methods_answer_for_this_router(kind: str, replay: bool) -> None:
    routing_type, coefficient, expected = OLD_KINDS[kind]
    router = make_router(enable_routing_replay=replay)
    router.routing_type, router.config.moe_aux_loss_coeff = routing_type, coefficient

    kinds = ("aux_loss", "seq_aux_loss", "global_aux_loss", "no_such_loss")
    answers = {name: router.get_aux_loss_coeff(name) for name in kinds}

    assert dict.fromkeys(kinds, 0.0) | expected == answers
    assert bool(expected) is router.is_aux_loss_enabled()


@pytest.mark.parametrize("name", METHOD_NAMES)
def test_aux_loss_methods_are_bound_to_the_router(name: str) -> None:
    routers = [make_router(), make_router()]

    for router in routers:
        method = getattr(router, name)
        assert type(method) is types.MethodType
        assert method.__self__ is router
        assert name not in vars(router)


@pytest.mark.parametrize("name", METHOD_NAMES)
def test_aux_loss_methods_that_the_release_has_are_its_own(name: str) -> None:
    function = vars(TopKRouter)[name]

    own = f"def {name}" in inspect.getsource(router_module)
    assert own == (function.__module__ == router_module.__name__)
    assert not hasattr(function, "__wrapped__")
