"""What is asked of mbridge, on one Megatron; for tests/trainers/test_mbridge.py.

python -m programs.trainers.mbridge with_plugin|later|without_plugin
"""

import json
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from helpers import bridge_questions  # isort: skip  (it comes before Megatron)
import torch

bridge_questions.init()
from mbridge import AutoBridge

ON = {"enable_routing_replay": True}


def with_plugin() -> dict[str, Any]:
    return {
        "fields": fields(),
        "argument": replayed(models(qwen3_moe(**ON), bf16=False)),
        "native_name": replayed(alone(qwen3_moe(moe_enable_routing_replay=True))),
        "attribute": replayed(alone(late())),
        "rope_theta": rope_theta(),
        "vl": as_a_decoder_twice(),
        "wrapped": replayed(models(qwen3_moe(torch.bfloat16, **ON), wrap_with_ddp=True)),
    }


def later() -> dict[str, Any]:
    """On a Megatron on which its `get_model` ends in an error of its own."""
    return {
        "fields": fields(),
        "get_model": error(lambda: models(qwen3_moe(**ON))),
        "argument": replayed(alone(qwen3_moe(**ON))),
        "native_name": replayed(alone(qwen3_moe(moe_enable_routing_replay=True))),
        "attribute": replayed(alone(late())),
    }


def without_plugin() -> dict[str, Any]:
    return {"argument": error(lambda: qwen3_moe(**ON)), "attribute": ignored()}


# --- questions ----------------------------------------------------------------------------------


def fields() -> dict[str, list[bool]]:
    bridge = qwen3_moe(**dict.fromkeys(bridge_questions.NAMES, True))
    given = [getattr(bridge.config, name) for name in bridge_questions.NAMES]
    bridge.set_extra_args(attention_dropout=0.0)  # makes the config again
    again = [getattr(bridge.config, name) for name in bridge_questions.NAMES]
    default = [getattr(qwen3_moe().config, name) for name in bridge_questions.NAMES]
    return {"given": given, "again": again, "default": default}


def replayed(model: Any) -> dict[str, Any]:
    [chunk] = model if isinstance(model, list) else [model]
    return bridge_questions.low_level(chunk) | bridge_questions.sessions(model)


def rope_theta() -> str:
    bridge = AutoBridge.from_config(bridge_questions.qwen3_moe(), dtype=torch.float32)
    return error(lambda: alone(bridge))


def as_a_decoder_twice() -> str:
    from transformers import Qwen3VLMoeConfig

    return error(lambda: AutoBridge.from_config(Qwen3VLMoeConfig()))


def ignored() -> list[bool]:
    routers = bridge_questions.routers(alone(late()))
    return [getattr(router, "router_replay", None) is None for router in routers]


def error(call: Callable[[], Any]) -> str:
    return bridge_questions.error(call)


# --- models -------------------------------------------------------------------------------------


def qwen3_moe(dtype: torch.dtype = torch.float32, **extra: bool) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        bridge_questions.qwen3_moe().save_pretrained(folder)
        bridge = AutoBridge.from_pretrained(folder, dtype=dtype)
    # transformers 5 has it in rope_parameters only, and mbridge does not look there.
    bridge.hf_config.rope_theta = 10000.0
    bridge.set_extra_args(**extra)
    return bridge


def late() -> Any:
    bridge = qwen3_moe()
    bridge.config.enable_routing_replay = True
    return bridge


def models(bridge: Any, **options: Any) -> Any:
    return bridge.get_model(**options)


def alone(bridge: Any) -> Any:
    return bridge._model_provider([])(pre_process=True, post_process=True)


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]]()))
