"""Compiled routers in inference, beside eager ones; for tests/release/replay/test_compile.py."""

import contextlib
import json

from programs.replay.compiling import (  # isort: skip  (it comes before Megatron)
    ACTIONS,
    H,
    K,
    error_of,
    forget,
    frames,
    graphs,
    make,
    some_ids,
)
import torch
from megatron.core.transformer.moe.router import (
    InferenceTopKRouter,
    topk_routing_with_score_function,
)
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

LAYERS = 12  # more than dynamo's limit of recompilations


@contextlib.contextmanager
def inference(routers):
    # What an inference engine does, in the two ways that there are.
    try:
        from megatron.core.inference.utils import InferenceMode
    except ImportError:
        InferenceMode = None
    for router in routers:
        router.eval()
        if hasattr(router, "set_inference_cuda_graphed_iteration"):
            router.set_inference_cuda_graphed_iteration()
    with torch.no_grad(), InferenceMode.active() if InferenceMode else contextlib.nullcontext():
        yield


def eagerly(router, hidden):
    c = router.config
    return topk_routing_with_score_function(
        router.gating(hidden).squeeze(1),
        router.topk,
        use_pre_softmax=c.moe_router_pre_softmax,
        scaling_factor=c.moe_router_topk_scaling_factor,
        score_function=router.score_function,
        expert_bias=router.expert_bias,
        router_replay=router.router_replay,
        dense_output=True,
    )


def same(a, b):  # inductor may order sums in another way
    return torch.equal(a[1], b[1]) and torch.allclose(a[0], b[0], rtol=1e-5, atol=1e-6)


def look(**options):
    forget()
    routers = [make(InferenceTopKRouter, **options) for _ in range(LAYERS)]
    tokens, out = 6, {}
    hidden = [torch.randn(tokens, 1, H) for _ in routers]
    buffer = torch.full((tokens + 2, LAYERS, K), -7, dtype=torch.int32)
    with inference(routers):
        for name, action in ACTIONS.items():
            if name == "replay_backward":  # inference has none
                continue
            forget()
            right = []
            for turn in range(4):
                RouterReplay.clear_global_router_replay_action()
                native = [eagerly(r, x) for r, x in zip(routers, hidden, strict=True)]
                RouterReplay.clear_global_indices()
                ids = [some_ids(tokens) for _ in routers]
                RouterReplay.set_replay_data(ids)
                for router in routers:
                    router.router_replay.router_replay_action = action
                if turn == 2:
                    RouterReplay.set_global_static_buffers(buffer)
                results = [r(x) for r, x in zip(routers, hidden, strict=True)]
                RouterReplay.clear_global_static_buffers()
                if name == "record":
                    recorded = [ids.long() for ids in RouterReplay.get_recorded_data()]
                    right += map(torch.equal, recorded, [ids for _, ids in results])
                if name == "replay_forward":
                    native = [eagerly(r, x) for r, x in zip(routers, hidden, strict=True)]
                    right += map(torch.equal, ids, [ids for _, ids in results])
                right += map(same, native, results)
                if turn == 0:
                    compiled_first = frames()
            out[name] = {"same": all(right), "graphs": graphs()}
            out[name]["new frames"] = frames() - compiled_first
        untouched = (buffer == -7).flatten(1).all(1)
        out["record"]["same"] &= untouched.tolist() == [False] * tokens + [True] * 2
        RouterReplay.clear_global_indices()
        out["error"] = error_of(routers[0], hidden[0])
    RouterReplay.clear_global_router_replay_instances()
    return out


def quantile_balancing():
    router = make(InferenceTopKRouter, moe_router_load_balancing_type="quantile_balancing")
    router.router_replay.set_router_replay_action(RouterReplayAction.RECORD)
    with inference([router]):
        return {"error": error_of(router, torch.randn(6, 1, H))}


result = {
    "inference softmax": look(),
    "inference sigmoid bias": look(
        moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True
    ),
}
if hasattr(InferenceTopKRouter, "quantile_balancing"):
    result["inference quantile balancing"] = quantile_balancing()
print(json.dumps(result))
