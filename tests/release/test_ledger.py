"""Other code that patches the same places of a real Megatron, and patches of ours that fail."""

from typing import Any

import pytest
from helpers import fresh

pytestmark = pytest.mark.mechanism

PRELUDE = """
import functools, inspect, json, sys, torch
import megatron.core.transformer.moe.router as router_module
import megatron.core.models.gpt.gpt_model
import replay_patch
from replay_patch.matrix import tiny
tiny.init()
from megatron.core.transformer.moe.router import TopKRouter

def state(name="router_objects"):
    return {p.name: p.state for p in replay_patch.status().patches}[name]

def replayed():
    "The routing map that replaying [3, 0] gives for one token."
    from megatron.core.transformer.moe.router_replay import RouterReplayAction
    router = tiny.router(tiny.moe_config(enable_routing_replay=True))
    router.router_replay.set_target_indices(torch.tensor([[3, 0]]))
    router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    return router(torch.randn(1, 1, 16))[1].int().tolist()

def wrapper(method, calls):
    @functools.wraps(method)
    def wrapped(self, *args, **kwargs):
        calls.append(1)
        return method(self, *args, **kwargs)
    return wrapped
"""


def run(code: str, **env: str) -> Any:
    return fresh.run(PRELUDE + code, bed=True, **({"REPLAY_PATCH": "1"} | env))


def test_competing_wrappers_both_run_once() -> None:
    """Case 43: A, then B, then A again."""
    code = """
calls = []
TopKRouter.forward = wrapper(TopKRouter.forward, calls)
replay_patch.activate()
print(json.dumps([state(), replayed(), len(calls)]))
"""

    assert run(code) == ["active", [[1, 0, 0, 1]], 1]


def test_an_overwritten_patch_is_lost_and_replay_is_refused_until_it_is_back() -> None:
    code = """
calls = []
TopKRouter.forward = wrapper(inspect.unwrap(TopKRouter.forward), calls)
out = [state()]
try:
    replayed()
except replay_patch.PatchNotActive as error:
    out.append(str(error))
replay_patch.activate()
reason = {p.name: p.reason for p in replay_patch.status().patches}["router_objects"]
out += [state(), reason, replayed(), len(calls)]
print(json.dumps(out))
"""

    lost, error, again, reason, routing_map, calls = run(code)

    assert lost == "lost"
    assert "patch router_objects is lost: replaced by other code: " in error
    assert "TopKRouter.forward" in error
    assert again == "active"
    assert "reinstalled, because other code had replaced " in reason
    assert (routing_map, calls) == ([[1, 0, 0, 1]], 1)


AFTER_DEACTIVATION = """
status = replay_patch.deactivate()
router = tiny.router(tiny.moe_config())
router(torch.randn(1, 1, 16))
print(json.dumps([status.active, list(status.problems), len(calls)]))
"""


def test_what_cannot_be_given_back_is_reported_and_harmless() -> None:
    code = f"""
calls, inner = [], TopKRouter.forward
def stranger(*args, inner=inner, **kwargs):  # not in a closure, where it could be exchanged
    calls.append(args)
    return inner(*args, **kwargs)
stranger.__wrapped__ = inner
TopKRouter.forward = stranger
{AFTER_DEACTIVATION}"""

    active, problems, calls = run(code)

    assert not active
    assert [p for p in problems if p.startswith("could not be restored: ")] == problems
    assert any("TopKRouter.forward" in p for p in problems)
    assert calls == 1


def test_ours_is_taken_out_of_a_wrapper_of_other_code() -> None:
    code = f"""
calls = []
TopKRouter.forward = wrapper(TopKRouter.forward, calls)
{AFTER_DEACTIVATION}"""

    assert run(code) == [False, [], 1]


def test_patches_come_back_around_a_forward_of_any_signature() -> None:
    code = """
inner = TopKRouter.forward
def stranger(*args, **kwargs):
    return inner(*args, **kwargs)
TopKRouter.forward = stranger
replay_patch.activate()
first = list(replay_patch.status().problems)
TopKRouter.forward = stranger
replay_patch.activate()
print(json.dumps([first, list(replay_patch.status().problems)]))
"""

    assert run(code) == [[], []]


def test_a_patch_that_raises_leaves_the_import_and_the_other_patches_alone() -> None:
    code = """
import dataclasses, json
from replay_patch.patching import registry
def broken(transaction):
    raise RuntimeError("a distinctive text")
made = tuple(
    dataclasses.replace(p, apply=broken) if p.name == "router_objects" else p
    for p in registry.patches()
)
registry.patches = lambda: made
import replay_patch
replay_patch.activate()
import megatron.core.transformer.moe.router
from megatron.core.transformer.transformer_config import TransformerConfig
sizes = dict(num_layers=1, hidden_size=8, num_attention_heads=2)
status = replay_patch.status()
states = {p.name: p.state for p in status.patches}
failed = [name for name, state in states.items() if state == "failed"]
try:
    TransformerConfig(**sizes, enable_routing_replay=True)
except replay_patch.PatchNotActive as error:
    print(json.dumps([failed, states["router_guard"], list(status.problems), str(error)]))
"""

    failed, guard, problems, error = fresh.run(code, bed=True)

    assert failed == ["router_objects"]
    assert guard == "active"
    assert problems == ["patch router_objects is failed: RuntimeError: a distinctive text"]
    assert "a distinctive text" in error


def test_a_megatron_module_that_fails_to_import_and_then_succeeds() -> None:
    code = """
import importlib, json, sys
import megatron.core
from replay_patch.patching.registry import patches
# Some releases import the router with the package.
of_megatron = [p for p in reversed(patches()) if not p.optional]
late = next(m for p in of_megatron for m in p.modules if m not in sys.modules)
class Broken:
    def find_spec(self, name, path=None, target=None):
        if name == late:
            raise ImportError("not yet")
sys.meta_path.insert(0, Broken())
try:
    importlib.import_module(late)
except ImportError as error:
    first = str(error)
sys.meta_path.pop(0)
import megatron.core.transformer.moe.router
import megatron.core.models.gpt.gpt_model
import replay_patch
states = {p.state for p in replay_patch.status().patches}
print(json.dumps([first, sorted(states), replay_patch.status().active]))
"""

    first, states, active = fresh.run(code, bed=True, REPLAY_PATCH="1")

    assert first == "not yet"
    assert set(states) <= {"active", "not needed"}
    assert active


def test_a_strangers_hook_that_raises_does_not_cost_us_ours() -> None:
    """wrapt forgets all hooks of a module whose first hook raises."""
    code = """
import json, sys
import wrapt
import megatron.core
from replay_patch.patching.registry import patches
of_megatron = [p for p in reversed(patches()) if not p.optional]
late = next(m for p in of_megatron for m in p.modules if m not in sys.modules)
failed = []
def stranger(module):
    failed.append(module)
    raise RuntimeError("a stranger's hook")
wrapt.importer._post_import_hooks[late].insert(0, stranger)
try:
    __import__(late)
except RuntimeError as error:
    first = str(error)
import megatron.core.transformer.moe.router
import megatron.core.models.gpt.gpt_model
import megatron.core.transformer.multi_token_prediction
import replay_patch
status = replay_patch.status()
print(json.dumps([first, len(failed), status.active, sorted({p.state for p in status.patches})]))
"""

    first, failed, active, states = fresh.run(code, bed=True, REPLAY_PATCH="1")

    assert (first, failed) == ("a stranger's hook", 1)
    assert active
    assert set(states) <= {"active", "not needed"}


def test_a_signature_that_we_have_never_seen_is_passed_on() -> None:
    """A later release, or a fork, with new arguments everywhere: the values arrive."""
    code = """
import functools, json
import megatron.core.transformer.moe.router as module
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig
seen = {}

def widened(function, label):
    @functools.wraps(function)
    def new(*args, brand_new=None, **kwargs):
        seen[label] = brand_new
        return function(*args, **kwargs)
    del new.__wrapped__
    import inspect
    signature = inspect.signature(function)
    extra = inspect.Parameter("brand_new", inspect.Parameter.KEYWORD_ONLY, default=None)
    new.__signature__ = signature.replace(parameters=[*signature.parameters.values(), extra])
    return new

Router, TopKRouter = module.Router, module.TopKRouter
TopKRouter.forward = widened(TopKRouter.forward, "forward")
TopKRouter.__init__ = widened(TopKRouter.__init__, "init")
TransformerConfig.__init__ = widened(TransformerConfig.__init__, "config")
import replay_patch
replay_patch.activate()
import torch
from replay_patch.matrix import tiny
tiny.init()
config = tiny.moe_config(enable_routing_replay=True, brand_new=1)
router = TopKRouter(config, **tiny.moe_groups(TopKRouter), brand_new=2)
router.set_layer_number(1)
routing_map = router(torch.randn(1, 1, 16), brand_new=3)[1]
print(json.dumps([seen, int(routing_map.sum()), replay_patch.status().active]))
"""

    seen, assigned, active = fresh.run(code, bed=True)

    assert seen == {"config": 1, "init": 2, "forward": 3}
    assert (assigned, active) == (2, True)


def test_deactivation_reaches_modules_that_were_imported_later() -> None:
    code = """
import types
trainer = types.ModuleType("trainer")
sys.modules["trainer"] = trainer
topk = next(n for n in ("topk_softmax_with_capacity", "topk_routing_with_score_function")
            if hasattr(router_module, n))
from megatron.core.transformer import transformer_block
for module, name in ((router_module, topk), (transformer_block, "get_num_layers_to_build")):
    setattr(trainer, name, getattr(module, name))
replay_patch.deactivate()
folder = "replay_patch/patches/"  # a checkout may lie in a folder named patches
def ours(function):
    return isinstance(function, types.FunctionType) and folder in function.__code__.co_filename
left = [f"{n}.{k}" for n, m in list(sys.modules.items()) for k, v in list(vars(m).items())
        if n.startswith(("megatron", "trainer")) and ours(v)]
print(json.dumps(left))
"""

    assert run(code) == []


def test_a_forward_that_is_overwritten_after_the_model_was_built_refuses_to_start() -> None:
    code = """
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
router = tiny.router(tiny.moe_config(enable_routing_replay=True))
TopKRouter.forward = inspect.unwrap(TopKRouter.forward)
errors = []
for start in (router.router_replay.set_router_replay_action,
              RouterReplay.set_global_router_replay_action):
    try:
        start(RouterReplayAction.REPLAY_FORWARD)
    except replay_patch.PatchNotActive as error:
        errors.append(str(error))
print(json.dumps([errors, router.router_replay.router_replay_action is None]))
"""

    errors, untouched = run(code)

    assert ["patch router_objects is lost" in error for error in errors] == [True, True]
    assert untouched


STRANGER = """
import functools, json
import megatron.core.transformer.moe.router as router_module
from megatron.core.transformer.moe import moe_utils
name = next(n for n in ("topk_softmax_with_capacity", "topk_routing_with_score_function")
            if hasattr(router_module, n))
original, calls = getattr(router_module, name), []
@functools.wraps(original)
def stranger(*args, **kwargs):
    calls.append(1)
    return original(*args, **kwargs)
"""


def test_a_strangers_wrapper_around_the_topk_function_runs_too() -> None:
    code = (
        STRANGER
        + """
router_module.__dict__[name] = moe_utils.__dict__[name] = stranger
import replay_patch
replay_patch.activate()
import torch
from replay_patch.matrix import tiny
from megatron.core.transformer.moe.router_replay import RouterReplayAction
tiny.init()
router = tiny.router(tiny.moe_config(enable_routing_replay=True))
router.router_replay.set_target_indices(torch.tensor([[3, 0]]))
router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
print(json.dumps([router(torch.randn(1, 1, 16))[1].int().tolist(), len(calls)]))
"""
    )

    assert fresh.run(code, bed=True) == [[[1, 0, 0, 1]], 1]


def test_a_topk_function_that_cannot_be_reached_is_a_failed_patch_where_it_matters() -> None:
    code = (
        STRANGER
        + """
router_module.__dict__[name] = moe_utils.__dict__[name] = functools.partial(original)
import replay_patch
try:
    replay_patch.activate()
    error = None
except replay_patch.PatchNotActive as e:
    error = str(e)
print(json.dumps([error, {p.name: p.state for p in replay_patch.status().patches}["router_topk"]]))
"""
    )

    error, state = fresh.run(code, bed=True)

    if state == "not needed":  # the release passes the replay object on
        assert error is None
    else:
        assert state == "failed"
        assert "is no plain Python function" in error
