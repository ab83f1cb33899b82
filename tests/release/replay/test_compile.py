"""Replay under the real `torch.compile`, which Megatron's `jit_fuser` is: same results, few graphs.

One fresh process runs everything with dynamo and a backend that runs the graphs as they are; each
test looks at one result. One more runs the router that Megatron compiles itself, with inductor.
"""

import functools
from typing import Any

import megatron.core.transformer.moe.router as router_module
import pytest
from helpers import interpreters

pytestmark = pytest.mark.mechanism

PREPARE = """
import contextlib, json
from replay_patch.matrix import cpu, tiny
cpu.install(torch_compile=True)
tiny.init()

import torch
from torch._dynamo.utils import counters
import megatron.core.transformer.moe.router as router_module
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

S, B, H, E, K = 4, 2, 16, 8, 3
ACTIONS = {"idle": None} | {action.value: action for action in RouterReplayAction}

def make(router_class=router_module.TopKRouter, **options):
    torch.manual_seed(0)
    options = {
        "moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0,
        "enable_routing_replay": True, "num_moe_experts": E, "moe_router_topk": K,
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
"""

TRAINING = """
def compile_forward(router):
    return torch.compile(lambda hidden: router(hidden), backend="eager"), contextlib.nullcontext()

def compile_routing(router):
    router.routing = torch.compile(router.routing, backend="eager")
    return router, contextlib.nullcontext()

NAME = next(n for n in ("topk_routing_with_score_function", "topk_softmax_with_capacity")
            if hasattr(router_module, n))

def compile_topk(router):
    from unittest import mock
    compiled = torch.compile(getattr(router_module, NAME), backend="eager")
    return router, mock.patch.object(router_module, NAME, compiled)

def outcome(function, router, hidden):
    router.zero_grad()
    hidden = hidden.clone().requires_grad_()
    probs, routing_map = function(hidden)
    (probs * torch.arange(E)).sum().backward()
    return [probs.detach(), routing_map, router.weight.grad.clone(), hidden.grad]

def chosen(routing_map):
    return routing_map.nonzero()[:, 1].view(-1, K)

def look(compile, **options):
    forget()
    eager, router, hidden = make(**options), make(**options), torch.randn(S, B, H)
    out = {}
    function, patched = compile(router)
    with patched:
        for name, action in ACTIONS.items():
            ids, results = some_ids(), []
            for r, f in ((eager, eager), (router, function)):
                r.router_replay.clear_indices()
                r.router_replay.set_target_indices(ids)
                r.router_replay.router_replay_action = action
                results.append(outcome(f, r, hidden))
            same = all(torch.equal(a, b) for a, b in zip(*results))
            if name == "record":
                recorded = [r.router_replay.get_recorded_indices() for r in (eager, router)]
                same &= torch.equal(*recorded)
            if name.startswith("replay"):
                same &= torch.equal(chosen(results[1][1]), ids.sort(1).values)
            out[name] = {"same": same, "graphs": graphs()}
        for name, action in ACTIONS.items():
            forget()  # else a limit that one action has reached would hide the next
            router.router_replay.router_replay_action = action
            right = []
            for turn in range(21):
                ids = some_ids()
                router.router_replay.clear_indices()
                for _ in range(1 + turn % 3):
                    router.router_replay.set_target_indices(ids)
                right.append(torch.equal(chosen(function(hidden)[1]), ids.sort(1).values))
                compiled_first = frames() if turn == 0 else compiled_first
            out[name]["new frames"] = frames() - compiled_first
            out[name]["same"] &= all(right) or not name.startswith("replay")
        router.router_replay.clear_indices()
        out["error"] = error_of(function, hidden)
    return out

result = {f.__name__: look(f) for f in (compile_forward, compile_routing, compile_topk)}
groups = {
    "moe_router_num_groups": 4, "moe_router_group_topk": 3, "moe_router_score_function": "sigmoid",
}
result["groups"] = look(compile_routing, **groups)
print(json.dumps(result))
"""

INFERENCE = """
from megatron.core.transformer.moe.router import (
    InferenceTopKRouter, topk_routing_with_score_function,
)

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
    with torch.no_grad(), (InferenceMode.active() if InferenceMode else contextlib.nullcontext()):
        yield

def eagerly(router, hidden):
    c = router.config
    return topk_routing_with_score_function(
        router.gating(hidden).squeeze(1), router.topk, use_pre_softmax=c.moe_router_pre_softmax,
        scaling_factor=c.moe_router_topk_scaling_factor, score_function=router.score_function,
        expert_bias=router.expert_bias, router_replay=router.router_replay, dense_output=True,
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
                native = [eagerly(r, x) for r, x in zip(routers, hidden)]
                RouterReplay.clear_global_indices()
                ids = [some_ids(tokens) for _ in routers]
                RouterReplay.set_replay_data(ids)
                for router in routers:
                    router.router_replay.router_replay_action = action
                if turn == 2:
                    RouterReplay.set_global_static_buffers(buffer)
                results = [r(x) for r, x in zip(routers, hidden)]
                RouterReplay.clear_global_static_buffers()
                if name == "record":
                    recorded = [ids.long() for ids in RouterReplay.get_recorded_data()]
                    right += map(torch.equal, recorded, [ids for _, ids in results])
                if name == "replay_forward":
                    native = [eagerly(r, x) for r, x in zip(routers, hidden)]
                    right += map(torch.equal, ids, [ids for _, ids in results])
                right += map(same, native, results)
                compiled_first = frames() if turn == 0 else compiled_first
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
"""


@functools.cache
def results(script: str) -> dict[str, Any]:
    return interpreters.run(PREPARE + script, REPLAY_PATCH="1")


def result(case: str) -> dict[str, Any]:
    return results(INFERENCE if case.startswith("inference") else TRAINING)[case]


HAS_INFERENCE = hasattr(router_module, "InferenceTopKRouter")
HAS_QUANTILES = hasattr(router_module.TopKRouter, "quantile_balancing")
TRAINED = ["compile_forward", "compile_routing", "compile_topk", "groups"]
INFERRED = ["inference softmax", "inference sigmoid bias"] * HAS_INFERENCE
ACTIONS = ["idle", "record", "replay_forward"]
RUNS = [(case, action) for case in TRAINED + INFERRED for action in ACTIONS]
RUNS += [(case, "replay_backward") for case in TRAINED]


@pytest.mark.parametrize("case, action", RUNS)
def test_compiled_and_eager_agree(case: str, action: str) -> None:
    """Outputs, recordings and gradients; bitwise but for inductor."""
    found = result(case)

    assert found["idle"]["graphs"] >= 1  # it was compiled
    assert found[action]["same"]


@pytest.mark.parametrize("case, action", RUNS)
def test_changing_targets_compile_nothing_anew(case: str, action: str) -> None:
    found = result(case)[action]

    assert found["new frames"] == 0


@pytest.mark.parametrize(
    "case, words",
    [(case, "no target") for case in TRAINED + INFERRED]
    + [("inference quantile balancing", "precomputed")] * HAS_QUANTILES,
)
def test_a_refusal_is_the_same_error_when_compiled(case: str, words: str) -> None:
    kind, text = result(case)["error"]

    assert kind == "RouteError"
    assert words in text
