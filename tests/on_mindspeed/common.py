"""What both scripts do first, and how they ask."""

import contextlib
import importlib
import io
import json
import sys
from collections.abc import Callable
from typing import Any

CONFIG = "megatron.core.transformer.transformer_config"
SIZES = {"num_layers": 4, "hidden_size": 8, "num_attention_heads": 2}
FLAGS = ("enable_routing_replay", "moe_enable_routing_replay", "moe_router_fusion")
ON = dict.fromkeys(FLAGS, True)


def import_megatron() -> None:
    """All that the plugin patches, and torch as Megatron sees it on a CPU."""
    from replay_patch.matrix import cpu
    from replay_patch.patching.registry import megatron_modules

    for name in megatron_modules():
        with contextlib.suppress(ModuleNotFoundError):  # not in this release
            importlib.import_module(name)
    cpu.patch_megatron()


def config_class(name: str) -> Any:
    return getattr(importlib.import_module(CONFIG), name)


def subclass(name: str) -> Any:
    """A dataclass of a trainer's, made now."""
    import dataclasses

    root = config_class("TransformerConfig")
    body = {"__module__": __name__, "__annotations__": {"extra": int}, "extra": 3}
    made = dataclasses.dataclass(type(name, (root,), body))
    setattr(sys.modules[__name__], name, made)  # where pickle looks for it
    return made


def outcome(action: Callable[[], Any]) -> Any:
    """What it returns, or the name of what it raises."""
    try:
        return action()
    except Exception as error:
        return type(error).__name__


def on_stage(rank: int, size: int, action: Callable[[], Any]) -> Any:
    """The outcome where this process is a pipeline stage, without process groups."""
    from megatron.core import parallel_state

    parallel_state.set_pipeline_model_parallel_rank(rank)
    parallel_state.set_pipeline_model_parallel_world_size(size)
    try:
        return outcome(action)
    finally:
        parallel_state.set_pipeline_model_parallel_rank(None)
        parallel_state.set_pipeline_model_parallel_world_size(None)


def helper(name: str) -> Any:
    """A layer helper, as it is bound now where the model's classes use it."""
    home = {"get_num_layers_to_build": "block", "get_transformer_layer_offset": "layer"}
    module = f"megatron.core.transformer.transformer_{home[name]}"
    return getattr(importlib.import_module(module), name)


def manager() -> Any:
    return importlib.import_module("mindspeed.patch_utils").MindSpeedPatchesManager


def report(main: Callable[..., Any]) -> None:
    """Print what it returns, as JSON on a line of its own, last and alone on stdout."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        answers = main(*sys.argv[1:])
    sys.stderr.write(said.getvalue())
    print(json.dumps(answers), flush=True)
