"""MindSpeed and the plugin in one process, in the order that is given. Prints answers as JSON.

hook     the plugin at the import of torch; MindSpeed then imports Megatron
before   the plugin, Megatron, MindSpeed
after    MindSpeed, Megatron, the plugin (REPLAY_PATCH=0)
"""

import copy
import dataclasses
import importlib
import inspect
import pickle
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

from common import (
    FLAGS,
    ON,
    SIZES,
    config_class,
    helper,
    import_megatron,
    manager,
    on_stage,
    outcome,
    report,
    subclass,
)

NAME = "enable_routing_replay"


def main(order: str) -> dict[str, Any]:
    import replay_patch
    from replay_patch.matrix import ascend_bed, cpu, tiny
    from replay_patch.matrix.checks import plugin

    cpu.install()
    if order == "before":
        import_megatron()
        classes = {"made before": subclass("MadeBefore")}
    ascend_bed.adapt()
    import_megatron()
    if order != "before":
        classes = {"made before": subclass("MadeBefore")}
    importer = import_by_value()
    if order == "after":
        replay_patch.activate()
    for name in ("TransformerConfig", "MLATransformerConfig"):
        classes[name] = config_class(name)
    tiny.init()
    oldest = new_router()

    def state() -> dict[str, Any]:
        classes["made after"] = subclass("MadeAfter")
        return {
            "status": status(),
            "flags": {name: flags(cls) for name, cls in classes.items()},
            "copies": {name: copies(cls) for name, cls in classes.items()},
            "unknown argument": outcome(lambda: make("TransformerConfig", other=5).other),
            "oldest router": outcome(lambda: runs(oldest)),
            "new router": outcome(lambda: runs(new_router())),
            "importer": importer(),
        }

    stages = {"start": state()}
    out: dict[str, Any] = {"stages": stages, "trainer's own": trainers_own()}
    if not ascend_bed.repatch():
        return out  # 2.1
    stages["repatch"] = state()
    ascend_bed.repatch(context_parallel_size=1)
    stages["second repatch"] = state()
    manager().remove_patches()
    stages["remove"] = state()
    manager().apply_patches()
    stages["apply"] = state()
    ascend_bed.repatch()
    stages["repatch after all"] = state()

    out["full arguments"] = {name: full_arguments(name) for name in list(classes)[1:3]}
    out["strings"] = strings()
    out["unaligned"] = unaligned()
    if hasattr(importlib.import_module(ROUTER), "topk_softmax_with_capacity"):
        out["tp_extend_ep"] = tp_extend_ep()
    left = replay_patch.deactivate().problems
    ascend_bed.repatch()
    out["deactivated"] = [*left, *plugin.ours()]
    return out


def trainers_own() -> dict[str, Any]:
    """A subclass named as its base (Megatron-Bridge has one), with a method, a field that is no
    argument, and its own idea of what a copy holds."""

    def without_lock(self: Any) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "lock"}

    root = config_class("TransformerConfig")
    body = {
        "__module__": __name__,
        "__annotations__": {"cached": int},
        "cached": dataclasses.field(init=False, default=1),
        "finalize": lambda self: "its own",
        "__getstate__": without_lock,
    }
    cls: Any = dataclasses.dataclass(type("TransformerConfig", (root,), body))
    sys.modules[__name__].TransformerConfig = cls
    config = cls(**SIZES, **{NAME: True})
    config.lock = threading.Lock()

    def kept(made: Any) -> bool:
        return isinstance(made, cls) and made.finalize() == "its own" and getattr(made, NAME)

    return {
        "deepcopy": outcome(lambda: kept(copy.deepcopy(config))),
        "pickle": outcome(lambda: kept(pickle.loads(pickle.dumps(config)))),
        "no argument": outcome(lambda: cls(**SIZES, cached=2)),
    }


ROUTER = "megatron.core.transformer.moe.router"


def make(name: str, **given: Any) -> Any:
    return config_class(name)(**SIZES, **given)


def status() -> list[str]:
    """What is wrong, in words."""
    import replay_patch

    now = replay_patch.status()
    wrong = [f"{p.name} is {p.state}" for p in now.patches if p.state in ("failed", "lost")]
    return [*wrong, *now.problems, *(() if now.active else ("not active",))]


def flags(cls: Any) -> Any:
    """Each flag as given (True), as not given, and on the class."""
    return [
        outcome(lambda: [getattr(cls(**SIZES, **ON), name) for name in FLAGS]),
        outcome(lambda: [getattr(cls(**SIZES), name) for name in FLAGS]),
        outcome(lambda: [getattr(cls, name) for name in FLAGS]),
    ]


def copies(cls: Any) -> Any:
    """The flag on each kind of copy of a config that has it on."""
    ways: dict[str, Callable[[Any], Any]] = {
        "deepcopy": copy.deepcopy,
        "replace": dataclasses.replace,
        "replace the flag": lambda config: dataclasses.replace(config, **{NAME: False}),
        "pickle": lambda config: pickle.loads(pickle.dumps(config)),
    }
    return {
        way: outcome(lambda make=make: getattr(make(cls(**SIZES, **{NAME: True})), NAME))
        for way, make in ways.items()
    }


def new_router() -> Any:
    from replay_patch.matrix import tiny
    from replay_patch.matrix.checks import tools

    return tiny.router(tools.config())


def runs(router: Any) -> dict[str, bool]:
    """Whether a router uses the ids that it is given, and records those that it chose."""
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    from replay_patch.matrix.checks import tools

    replay, ids = router.router_replay, tools.some_ids()
    replay.clear_indices()
    replay.set_target_indices(ids)
    replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    replayed = router(tools.hidden_states())[1]
    replay.clear_indices()
    replay.set_router_replay_action(RouterReplayAction.RECORD)
    chosen = router(tools.hidden_states())[1]
    recorded = replay.get_recorded_indices()
    replay.clear_router_replay_action()
    return {
        "replays": bool((replayed == tools.as_map(ids)).all()),
        "records": bool((chosen == tools.as_map(recorded)).all()),
        "differ": bool((replayed != chosen).any()),
    }


def import_by_value() -> Callable[[], bool]:
    """Bind the router's top-k function in a module of its own, as `from ... import` does.

    Returns:
        Asks whether that module calls what the router calls.
    """
    router = importlib.import_module(ROUTER)
    names = ("topk_softmax_with_capacity", "topk_routing_with_score_function")
    [name] = [name for name in names if hasattr(router, name)]
    module = types.ModuleType("an_importer")
    sys.modules["an_importer"] = module
    setattr(module, name, getattr(router, name))
    return lambda: getattr(module, name) is getattr(router, name)


def full_arguments(name: str) -> dict[str, Any]:
    """Replay among MindSpeed's own arguments, as each value; and with the config saying False."""
    from replay_patch.matrix import ascend_bed
    from replay_patch.megatron.config import replay_enabled

    out: dict[str, Any] = {}
    for value in (True, False, "true", "false"):
        ascend_bed.repatch(**{NAME: value})
        out[repr(value)] = outcome(lambda: replay_enabled(make(name)))
        if value is True:
            out["True, config False"] = outcome(lambda: replay_enabled(make(name, **{NAME: False})))
    delattr(ascend_bed.mindspeed_args(), NAME)
    ascend_bed.repatch()
    return out


def strings() -> dict[str, Any]:
    """Case 89: a string where the config has an enum, and what it leaves behind."""
    from replay_patch.matrix import ascend_bed

    ascend_bed.repatch(attention_backend="flash")
    answer = outcome(lambda: repr(make("TransformerConfig").attention_backend))
    del ascend_bed.mindspeed_args().attention_backend
    ascend_bed.repatch()
    return {"config": answer, "status": status()}


def unaligned() -> dict[str, Any]:
    """Layers of each stage of [[3], [1]] by MindSpeed's helper, which takes only the config."""
    from replay_patch.matrix import ascend_bed

    def config() -> Any:
        return make("TransformerConfig", pipeline_model_parallel_size=2, pipeline_dtype="float32")

    def on_each(ask: Callable[[Any, Any], Any]) -> list[Any]:
        layers = helper("get_num_layers_to_build")
        return [on_stage(rank, 2, lambda: ask(layers, config())) for rank in range(2)]

    ascend_bed.repatch(pipeline_num_transformer_layers=[[3], [1]])
    out = {
        "layers": on_each(lambda layers, config: layers(config)),
        "with vp_stage": on_each(lambda layers, config: layers(config, vp_stage=0)),
        "of rank 1": on_each(lambda layers, config: layers(config, vp_stage=0, pp_rank=1)),
        "status": status(),
    }
    ascend_bed.repatch(pipeline_num_transformer_layers=None)
    out["off"] = on_each(lambda layers, config: layers(config))
    out["of rank 1, off"] = on_each(lambda layers, config: layers(config, vp_stage=None, pp_rank=1))
    return out


def tp_extend_ep() -> dict[str, Any]:
    """MindSpeed's own routing method, which replaces the release's (core 0.12)."""
    from replay_patch.matrix import ascend_bed
    from replay_patch.matrix.checks import tools

    needed = {
        "moe_token_dispatcher_type": "alltoall_seq",
        "num_experts": tools.EXPERTS,  # the real one validates
        "moe_permutation_async_comm": True,
        "moe_grouped_gemm": True,
    }
    ascend_bed.repatch(moe_tp_extend_ep=True, **needed)
    routing = inspect.unwrap(importlib.import_module(ROUTER).TopKRouter.routing)
    out = {
        "is MindSpeed's": routing.__module__.startswith("mindspeed"),
        "on": outcome(lambda: runs(new_router())),
        "status": status(),
    }
    ascend_bed.repatch(moe_tp_extend_ep=False)
    for name in needed:
        delattr(ascend_bed.mindspeed_args(), name)
    ascend_bed.repatch()
    out["off"] = outcome(lambda: runs(new_router()))
    return out


if __name__ == "__main__":
    report(main)
