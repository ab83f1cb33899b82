"""For tests/release/patching/test_activation.py: activation around a real Megatron."""

import sys
from types import ModuleType
from typing import Any

SIZES = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
TOPK = ("topk_softmax_with_capacity", "topk_routing_with_score_function")


def loaded_by_torch() -> list[str]:
    import torch

    return [name for name in sys.modules if name.split(".")[0] == "megatron"]


def first(module: str) -> list[Any]:
    """Import "torch" or "megatron" first; what became of the plugin."""
    from replay_patch.megatron import no_triton

    no_triton.provide()
    if module == "torch":
        import torch
    import_models()
    return report()


def already_imported() -> list[Any]:
    import_models()
    import replay_patch

    replay_patch.activate()
    return report()


def given_back() -> list[list[str]]:
    """[what `activate()` has changed, what is not as before after `deactivate()`]."""
    import_models()
    import replay_patch

    def state() -> dict[str, Any]:
        objects = {}
        for name, module in list(sys.modules.items()):
            if name.startswith("megatron."):
                objects[name] = dict(vars(module))
                for key, value in vars(module).items():
                    if isinstance(value, type) and value.__module__ == name:
                        objects[name + ":" + key] = dict(vars(value))
        return objects

    before = state()
    replay_patch.activate()
    from megatron.core.transformer.moe.router_replay import RouterReplay

    changed = [name for name, value in state().items() if value != before.get(name)]
    replay_patch.deactivate()
    after = state()
    return [sorted(changed), [name for name in after if after[name] != before.get(name)]]


def untouched() -> list[bool]:
    """[the config has our field, there is a `router_replay`, our patches are imported]."""
    import_models()
    import dataclasses

    from megatron.core.transformer.transformer_config import TransformerConfig

    names = {field.name for field in dataclasses.fields(TransformerConfig)}
    try:
        import megatron.core.transformer.moe.router_replay

        module = True
    except ImportError:
        module = False
    return ["enable_routing_replay" in names, module, "replay_patch.patches" in sys.modules]


def without_triton() -> list[Any]:
    import torch

    import replay_patch

    error = None
    try:
        import megatron.core
    except ImportError as failure:
        error = str(failure)
    status = replay_patch.status()
    return [error, status.enabled, status.active, list(status.problems)]


def states(version: str) -> dict[str, str]:
    """Of all patches, on a Megatron that says it is of this version."""
    import megatron.core.package_info as info

    info.__version__ = version
    import_models()
    import replay_patch

    return {patch.name: patch.state for patch in replay_patch.status().patches}


def bound_by_value() -> list[bool]:
    from megatron.core.transformer.moe import moe_utils, router

    name = next(name for name in TOPK if hasattr(router, name))
    trainer = ModuleType("trainer")
    sys.modules["trainer"] = trainer
    original = getattr(moe_utils, name)
    setattr(trainer, name, original)
    import replay_patch

    replay_patch.activate()
    functions = [getattr(module, name) for module in (moe_utils, router, trainer)]
    return [f is functions[0] and f.__wrapped__ is original for f in functions]


def missing_seam() -> list[Any]:
    import megatron.core.transformer.moe.router as router

    for name in TOPK:
        vars(router).pop(name, None)
    import replay_patch

    errors = []
    for use in (
        replay_patch.activate,
        lambda: TransformerConfig(**SIZES, enable_routing_replay=True),
    ):
        from megatron.core.transformer.transformer_config import TransformerConfig

        try:
            use()
        except replay_patch.PatchNotActive as error:
            errors.append(str(error))
    return [errors, TransformerConfig(**SIZES).enable_routing_replay]


def refusal() -> str | None:
    """Of a config with replay."""
    import_models()
    from megatron.core.transformer.transformer_config import TransformerConfig

    import replay_patch

    try:
        TransformerConfig(**SIZES, enable_routing_replay=True)
    except replay_patch.PatchNotActive as error:
        return str(error)
    return None


def import_models() -> None:
    import megatron.core.models.gpt.gpt_model
    import megatron.core.transformer.moe.router


def report() -> list[Any]:
    import replay_patch

    status = replay_patch.status()
    return [status.active, status.trigger, sorted({patch.state for patch in status.patches})]
