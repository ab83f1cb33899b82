"""Which config builds replay objects, and how its fields are read."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.routers import FIELDS, make_config, make_router
from megatron.core.transformer.moe.router_replay import RouterReplay

from replay_patch.matrix import tiny
from replay_patch.megatron.config import router_padding


@pytest.mark.parametrize("name", ["enable_routing_replay", "moe_enable_routing_replay"])
@pytest.mark.parametrize(
    "value, on", [(True, True), ("true", True), ("True", True), (False, False), ("false", False)]
)
def test_either_config_name_builds_the_object(name: str, value: Any, on: bool) -> None:
    router = make_router(**{"enable_routing_replay": False, name: value})

    assert on == (router.router_replay is not None)
    assert int(on) == len(RouterReplay.global_router_replay_instances)


@pytest.mark.parametrize("name", ["enable_routing_replay", "moe_enable_routing_replay"])
def test_an_attribute_set_after_construction_builds_the_object(name: str) -> None:
    config = make_config(enable_routing_replay=False)
    setattr(config, name, True)

    router = tiny.router(config)

    assert [router.router_replay] == RouterReplay.global_router_replay_instances
    assert type(router.router_replay) is RouterReplay


@pytest.mark.parametrize(
    "attributes, padded",
    [
        ({}, False),
        ({"moe_router_padding_for_fp8": True}, True),
        ({"moe_router_padding_for_fp8": False}, False),
        ({"moe_router_padding_for_fp8": None}, False),
        ({"moe_router_padding_for_quantization": True}, True),
        ({"moe_router_padding_for_quantization": False}, False),
        ({"moe_router_padding_for_quantization": False, "moe_router_padding_for_fp8": True}, True),
        ({"moe_router_padding_for_quantization": True, "moe_router_padding_for_fp8": False}, True),
        ({"moe_router_padding_for_quantization": "false"}, False),
    ],
)
def test_router_padding_is_read_under_either_name_or_none(
    attributes: dict[str, Any], padded: bool
) -> None:
    assert padded is router_padding(SimpleNamespace(**attributes))


def test_router_padding_reads_this_release() -> None:
    config = make_config()
    assert router_padding(config) is False

    for name in ("moe_router_padding_for_fp8", "moe_router_padding_for_quantization"):
        if name in FIELDS:
            changed = copy.copy(config)
            setattr(changed, name, True)
            assert router_padding(changed) is True
