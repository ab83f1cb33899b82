"""For tests/release/patching/test_ledger.py: other code that patches what we patch.

Each function is a process of its own on the CPU bed. Those that need a plugin in place when they
start are run with REPLAY_PATCH=1, and begin with `begin()`.
"""

import functools
import inspect
import sys
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

TOPK = ("topk_softmax_with_capacity", "topk_routing_with_score_function")
SIZES = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
_FOLDER = "replay_patch/patches/"  # a checkout may lie in a folder named patches


def competing_wrapper() -> list[Any]:
    """Ours, another around it, and ours again."""
    router = begin()
    calls: list[int] = []
    router.forward = wrapper(router.forward, calls)
    activate()
    return [state(), replayed(), len(calls)]


def overwritten() -> list[Any]:
    import replay_patch

    router = begin()
    calls: list[int] = []
    router.forward = wrapper(inspect.unwrap(router.forward), calls)
    answer: list[Any] = [state()]
    try:
        replayed()
    except replay_patch.PatchNotActive as error:
        answer.append(str(error))
    activate()
    reason = {p.name: p.reason for p in replay_patch.status().patches}["router_objects"]
    return [*answer, state(), reason, replayed(), len(calls)]


def kept_by_a_stranger() -> list[Any]:
    router = begin()
    calls: list[Any] = []

    # An argument, not in a closure, where it could be exchanged.
    def stranger(*args: Any, inner: Any = router.forward, **kwargs: Any) -> Any:
        calls.append(args)
        return inner(*args, **kwargs)

    stranger.__wrapped__ = router.forward  # type: ignore[attr-defined]
    router.forward = stranger
    return [*after_deactivation(), len(calls)]


def taken_out_of_a_wrapper() -> list[Any]:
    router = begin()
    calls: list[int] = []
    router.forward = wrapper(router.forward, calls)
    return [*after_deactivation(), len(calls)]


def any_signature() -> list[list[str]]:
    """The problems after each activation."""
    import replay_patch

    router = begin()
    globals()["original_forward"] = router.forward
    answer = []
    for _ in range(2):
        router.forward = forward_of_any_signature
        activate()
        answer.append(list(replay_patch.status().problems))
    return answer


def patch_that_raises() -> list[Any]:
    import dataclasses

    from replay_patch.patching import registry

    def broken(transaction: Any) -> None:
        raise RuntimeError("a distinctive text")

    made = tuple(
        dataclasses.replace(p, apply=broken) if p.name == "router_objects" else p
        for p in registry.patches()
    )
    registry.patches = lambda: made  # type: ignore[assignment]
    import replay_patch

    activate()
    import megatron.core.transformer.moe.router
    from megatron.core.transformer.transformer_config import TransformerConfig

    status = replay_patch.status()
    states = {p.name: p.state for p in status.patches}
    failed = [name for name, state in states.items() if state == "failed"]
    try:
        TransformerConfig(**SIZES, enable_routing_replay=True)
    except replay_patch.PatchNotActive as error:
        return [failed, states["router_guard"], list(status.problems), str(error)]
    return []


def import_that_fails_first() -> list[Any]:
    import importlib

    import megatron.core

    late = not_yet_imported()

    class Broken:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
            if name == late:
                raise ImportError("not yet")

    sys.meta_path.insert(0, Broken())  # type: ignore[arg-type]
    try:
        importlib.import_module(late)
    except ImportError as error:
        first = str(error)
    sys.meta_path.pop(0)
    import megatron.core.models.gpt.gpt_model
    import megatron.core.transformer.moe.router

    import replay_patch

    status = replay_patch.status()
    return [first, sorted({p.state for p in status.patches}), status.active]


def hook_that_raises() -> list[Any]:
    import megatron.core
    import wrapt

    late = not_yet_imported()
    failed = []

    def stranger(module: ModuleType) -> None:
        failed.append(module)
        raise RuntimeError("a stranger's hook")

    wrapt.importer._post_import_hooks[late].insert(0, stranger)
    try:
        __import__(late)
    except RuntimeError as error:
        first = str(error)
    import megatron.core.models.gpt.gpt_model
    import megatron.core.transformer.moe.router
    import megatron.core.transformer.multi_token_prediction

    import replay_patch

    status = replay_patch.status()
    return [first, len(failed), status.active, sorted({p.state for p in status.patches})]


def unknown_signature() -> list[Any]:
    import megatron.core.transformer.moe.router as module
    from megatron.core.transformer.transformer_config import TransformerConfig

    seen = {}

    def widened(function: Callable[..., Any], label: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def new(*args: Any, brand_new: Any = None, **kwargs: Any) -> Any:
            seen[label] = brand_new
            return function(*args, **kwargs)

        del new.__wrapped__  # type: ignore[attr-defined]
        signature = inspect.signature(function)
        extra = inspect.Parameter("brand_new", inspect.Parameter.KEYWORD_ONLY, default=None)
        parameters = [*signature.parameters.values(), extra]
        new.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return new

    router_class = module.TopKRouter
    router_class.forward = widened(router_class.forward, "forward")
    router_class.__init__ = widened(router_class.__init__, "init")
    TransformerConfig.__init__ = widened(TransformerConfig.__init__, "config")
    activate()
    import torch

    import replay_patch
    from replay_patch.matrix import tiny

    tiny.init()
    config = tiny.moe_config(enable_routing_replay=True, brand_new=1)
    router = router_class(config, **tiny.moe_groups(router_class), brand_new=2)
    router.set_layer_number(1)
    routing_map = router(torch.randn(1, 1, 16), brand_new=3)[1]
    return [seen, int(routing_map.sum()), replay_patch.status().active]


def left_in_later_modules() -> list[str]:
    """What is still ours after `deactivate()`, also in a module made after activation."""
    begin()
    import megatron.core.transformer.moe.router as router_module
    from megatron.core.transformer import transformer_block

    import replay_patch

    trainer = ModuleType("trainer")
    sys.modules["trainer"] = trainer
    topk = topk_name(router_module)
    for module, name in ((router_module, topk), (transformer_block, "get_num_layers_to_build")):
        setattr(trainer, name, getattr(module, name))
    replay_patch.deactivate()

    def ours(function: Any) -> bool:
        if not isinstance(function, FunctionType):
            return False
        return _FOLDER in function.__code__.co_filename

    return [
        f"{name}.{key}"
        for name, module in list(sys.modules.items())
        if name.startswith(("megatron", "trainer"))
        for key, value in list(vars(module).items())
        if ours(value)
    ]


def overwritten_after_the_model_was_built() -> list[Any]:
    router_class = begin()
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    import replay_patch
    from replay_patch.matrix import tiny

    router = tiny.router(tiny.moe_config(enable_routing_replay=True))
    router_class.forward = inspect.unwrap(router_class.forward)
    errors = []
    for start in (
        router.router_replay.set_router_replay_action,
        RouterReplay.set_global_router_replay_action,
    ):
        try:
            start(RouterReplayAction.REPLAY_FORWARD)
        except replay_patch.PatchNotActive as error:
            errors.append(str(error))
    return [errors, router.router_replay.router_replay_action is None]


def topk_in_a_wrapper() -> list[Any]:
    from megatron.core.transformer.moe import moe_utils, router

    name = topk_name(router)
    globals()["original_topk"] = getattr(router, name)
    stranger = functools.wraps(original_topk)(counted_topk)
    vars(router)[name] = vars(moe_utils)[name] = stranger
    activate()
    from replay_patch.matrix import tiny

    tiny.init()
    return [replayed(), len(topk_calls)]


def topk_out_of_reach() -> list[Any]:
    from megatron.core.transformer.moe import moe_utils, router

    name = topk_name(router)
    partial = functools.partial(getattr(router, name))
    vars(router)[name] = vars(moe_utils)[name] = partial
    import replay_patch

    error = None
    try:
        activate()
    except replay_patch.PatchNotActive as refusal:
        error = str(refusal)
    return [error, state("router_topk")]


# --- strangers that find what they call among the globals of their module -----------------------

original_forward: Any = None
original_topk: Any = None
topk_calls: list[int] = []


def forward_of_any_signature(*args: Any, **kwargs: Any) -> Any:
    return original_forward(*args, **kwargs)


def counted_topk(*args: Any, **kwargs: Any) -> Any:
    topk_calls.append(1)
    return original_topk(*args, **kwargs)


# --- what they share ----------------------------------------------------------------------------


def begin() -> Any:
    """Import Megatron and make process groups; returns the router class."""
    import megatron.core.models.gpt.gpt_model
    from megatron.core.transformer.moe.router import TopKRouter

    from replay_patch.matrix import tiny

    tiny.init()
    return TopKRouter


def activate() -> None:
    import replay_patch

    replay_patch.activate()


def state(name: str = "router_objects") -> str:
    import replay_patch

    return {p.name: p.state for p in replay_patch.status().patches}[name]


def replayed() -> list[list[int]]:
    """The routing map that replaying [3, 0] gives for one token."""
    import torch
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    from replay_patch.matrix import tiny

    router = tiny.router(tiny.moe_config(enable_routing_replay=True))
    router.router_replay.set_target_indices(torch.tensor([[3, 0]]))
    router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    routing_map: list[list[int]] = router(torch.randn(1, 1, 16))[1].int().tolist()
    return routing_map


def wrapper(method: Callable[..., Any], calls: list[int]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return method(self, *args, **kwargs)

    return wrapped


def after_deactivation() -> list[Any]:
    import torch

    import replay_patch
    from replay_patch.matrix import tiny

    status = replay_patch.deactivate()
    tiny.router(tiny.moe_config())(torch.randn(1, 1, 16))
    return [status.active, list(status.problems)]


def topk_name(router: ModuleType) -> str:
    return next(name for name in TOPK if hasattr(router, name))


def not_yet_imported() -> str:
    """A module that a patch waits for. Some releases import the router with the package."""
    from replay_patch.patching.registry import patches

    of_megatron = [patch for patch in reversed(patches()) if not patch.optional]
    return next(m for patch in of_megatron for m in patch.modules if m not in sys.modules)
