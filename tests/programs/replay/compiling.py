"""Routers under the real `torch.compile`, for `compiled_training` and `compiled_inference`.

Importing this installs the CPU bed, which has to come before Megatron.
"""

from replay_patch.matrix import cpu, tiny

cpu.install(torch_compile=True)
tiny.init()

import megatron.core.transformer.moe.router as router_module
import torch
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch._dynamo.utils import counters

S, B, H, E, K = 4, 2, 16, 8, 3
ACTIONS = {"idle": None} | {action.value: action for action in RouterReplayAction}


def make(router_class=router_module.TopKRouter, **options):
    torch.manual_seed(0)
    options = {
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "enable_routing_replay": True,
        "num_moe_experts": E,
        "moe_router_topk": K,
    } | options
    router = router_class(config=tiny.moe_config(**options), **tiny.moe_groups(router_class))
    router.set_layer_number(1)
    return router


def some_ids(rows=S * B):
    return torch.rand(rows, E).argsort(1)[:, :K].contiguous()


def graphs():
    return counters["stats"]["unique_graphs"]


def frames():
    return counters["frames"]["total"]


def error_of(function, *args):
    try:
        function(*args)
    except Exception as error:
        return type(error).__name__, str(error)


def forget():
    torch._dynamo.reset()
    counters.clear()
