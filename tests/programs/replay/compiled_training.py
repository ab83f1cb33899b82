"""Compiled routers in training, beside eager ones; for tests/release/replay/test_compile.py."""

import contextlib
import json
from unittest import mock

from programs.replay.compiling import (  # isort: skip  (it comes before Megatron)
    ACTIONS,
    B,
    E,
    H,
    K,
    S,
    error_of,
    forget,
    frames,
    graphs,
    make,
    some_ids,
)
import torch
from megatron.core.transformer.moe import router as router_module


def compile_forward(router):
    return torch.compile(lambda hidden: router(hidden), backend="eager"), contextlib.nullcontext()


def compile_routing(router):
    router.routing = torch.compile(router.routing, backend="eager")
    return router, contextlib.nullcontext()


NAME = next(
    n
    for n in ("topk_routing_with_score_function", "topk_softmax_with_capacity")
    if hasattr(router_module, n)
)


def compile_topk(router):
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
            same = all(torch.equal(a, b) for a, b in zip(*results, strict=True))
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
                if turn == 0:
                    compiled_first = frames()
            out[name]["new frames"] = frames() - compiled_first
            out[name]["same"] &= all(right) or not name.startswith("replay")
        router.router_replay.clear_indices()
        out["error"] = error_of(function, hidden)
    return out


result = {f.__name__: look(f) for f in (compile_forward, compile_routing, compile_topk)}
groups = {
    "moe_router_num_groups": 4,
    "moe_router_group_topk": 3,
    "moe_router_score_function": "sigmoid",
}
result["groups"] = look(compile_routing, **groups)
print(json.dumps(result))
