"""What is asked of Megatron-Bridge, on one Megatron; for tests/trainers/test_megatron_bridge.py.

python -m programs.trainers.megatron_bridge with_plugin|without_plugin|beyond_its_pin
"""

import json
import sys
from typing import Any

from helpers import bridge_questions

bridge_questions.init()
from helpers import bridge_configs as configs
from helpers import bridge_models as models

LEGACY = {"enable_routing_replay": True}


def with_plugin() -> dict[str, Any]:
    import replay_patch

    return {
        "lacking": configs.lacking(),
        "saved": all_on(),
        "replayed": models.replayed(),
        "twice": models.decoder_built_twice(),
        "twice_by_session": models.twice_by_session(),
        "recompute": models.recomputed(),
        "lora_on_the_router": models.lora_on_the_router(),
        "failed": [
            patch.name
            for patch in replay_patch.status().patches
            if patch.state in ("failed", "lost")
        ],
    }


def without_plugin() -> dict[str, Any]:
    return {
        "constructor": bridge_questions.error(lambda: configs.provider(**LEGACY)),
        "override": bridge_questions.error(lambda: configs.overridden(configs.provider(), LEGACY)),
        "routers_without_replay": set_late(),
        "twice": models.decoder_built_twice(),
        "lora_on_the_router": models.lora_on_the_router(),
        "late": activated_late(),
    }


def beyond_its_pin() -> dict[str, Any]:
    return {
        "distributed": bridge_questions.error(lambda: models.qwen3_moe("enable_routing_replay")),
        "training": bridge_questions.error(all_on),
        "lacking": configs.lacking(),
        "alone": alone(),
    }


def all_on() -> dict[str, Any]:
    return configs.saved(configs.provider(**dict.fromkeys(bridge_questions.NAMES, True)))


def set_late() -> list[bool]:
    [model] = models.qwen3_moe("enable_routing_replay")
    routers = bridge_questions.routers(model)
    return [getattr(router, "router_replay", None) is None for router in routers]


def activated_late() -> list[Any]:
    from megatron.core.transformer.moe.router_replay import RouterReplay

    RouterReplay.clear_global_router_replay_instances()
    import replay_patch

    replay_patch.activate()
    return [configs.lacking(), all_on(), models.replayed(), models.decoder_built_twice()]


def alone() -> dict[str, Any]:
    model = models.provided_alone("enable_routing_replay")
    return bridge_questions.low_level(model) | bridge_questions.sessions(model)


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]]()))
