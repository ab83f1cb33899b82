"""What MindSpeed does to others' work, asked without the plugin. Prints answers as JSON.

Each answer is the same on the stand-in and on the real MindSpeed (2.2 and later).
"""

import copy
import dataclasses
import functools
import pickle
from typing import Any

from common import (
    FLAGS,
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


def main() -> dict[str, Any]:
    from replay_patch.matrix import ascend_bed, cpu

    cpu.install()
    ascend_bed.adapt()
    import_megatron()
    out: dict[str, Any] = {"branch": branch()}
    if not hasattr(manager(), "remove_patches"):
        return out  # 2.1
    out["no attribute"] = both_configs()
    out |= copies() | subclasses() | full_arguments()
    out["class attribute"] = class_attribute()
    out |= (
        wrapped_init() | replaced_helper(ascend_bed) | unaligned(ascend_bed) | strings(ascend_bed)
    )
    out["registered twice"] = registered_twice()
    return out


def branch() -> list[str]:
    """How this branch differs: the words that the stand-in takes."""
    patched = getattr(manager(), "patches_info", {})
    end = "transformer_config."
    words = []
    if any(name.endswith(f"{end}TransformerConfig.__init_subclass__") for name in patched):
        words.append("init_subclass")
    if not any(name.endswith(f"{end}MLATransformerConfig.__init__") for name in patched):
        words.append("no_mla")
    return words


def make(cls: Any, **given: Any) -> Any:
    return outcome(lambda: getattr(cls(**SIZES, **given), NAME, "absent"))


def both_configs() -> dict[str, Any]:
    """The value of the flag where True is given, and where nothing is."""
    classes = [config_class(name) for name in ("TransformerConfig", "MLATransformerConfig")]
    return {cls.__name__: [make(cls, **{NAME: True}), make(cls)] for cls in classes}


def class_attribute() -> Any:
    """Case 3: the same, with what an older verl did."""
    root = config_class("TransformerConfig")
    setattr(root, NAME, False)
    try:
        return both_configs()
    finally:
        delattr(root, NAME)


def copies() -> dict[str, Any]:
    """D2."""
    config = config_class("TransformerConfig")(**SIZES, **{NAME: True})
    return {
        "same class": type(config) is config_class("TransformerConfig"),
        "an instance": isinstance(config, config_class("TransformerConfig")),
        "deepcopy": outcome(lambda: getattr(copy.deepcopy(config), NAME)),
        "replace": outcome(lambda: getattr(dataclasses.replace(config), NAME)),
        "pickle": outcome(lambda: getattr(pickle.loads(pickle.dumps(config)), NAME)),
    }


def subclasses() -> dict[str, Any]:
    later = subclass("Later")
    return {"subclass": [make(later), make(later, **{NAME: True})]}


def full_arguments() -> dict[str, Any]:
    """The flag among MindSpeed's own arguments, by a repatch and by a class attribute."""
    from replay_patch.matrix import ascend_bed

    ascend_bed.repatch(**{NAME: True})
    root = config_class("TransformerConfig")
    try:
        answers = [make(root), make(root, **{NAME: False})]
        setattr(root, NAME, False)
        answers.append(make(root))
        delattr(root, NAME)
    finally:
        delattr(ascend_bed.mindspeed_args(), NAME)
        ascend_bed.repatch()
    return {"full arguments": answers}


def wrapped_init() -> dict[str, Any]:
    """Case 87: whether a stranger's wrapper of a config's `__init__` is called."""
    from replay_patch.matrix import ascend_bed

    root, calls = config_class("TransformerConfig"), []
    original = root.__init__

    @functools.wraps(original)
    def strange(self: Any, *args: Any, **kwargs: Any) -> None:
        calls.append(type(self))
        original(self, *args, **kwargs)

    def called() -> bool:
        calls.clear()
        root(**SIZES)
        return bool(calls)

    root.__init__ = strange
    answers = [called()]
    manager().apply_patches()  # of which all are applied
    answers.append(called())
    ascend_bed.repatch()
    return {"wrapped __init__": [*answers, called()]}


def replaced_helper(ascend_bed: Any) -> dict[str, Any]:
    """Case 87: a helper that MindSpeed replaces while a feature is on, replaced by a stranger."""
    from megatron.core.transformer import transformer_block

    name, original = "get_num_layers_to_build", helper("get_num_layers_to_build")

    def strange(config: Any, *args: Any, **kwargs: Any) -> int:
        return 77

    def theirs() -> bool:
        return helper(name) is strange

    ascend_bed.repatch(pipeline_num_transformer_layers=[[3], [1]])
    answers = [theirs(), helper(name) is original]
    setattr(transformer_block, name, strange)
    answers.append(theirs())
    ascend_bed.repatch()
    answers.append(theirs())
    ascend_bed.repatch(pipeline_num_transformer_layers=None)
    return {"replaced helper": [*answers, theirs(), helper(name) is original]}


def unaligned(ascend_bed: Any) -> dict[str, Any]:
    """Cases 8 and 23: (layers, offset) of each stage of [[3], [1]], the helper's own offset, and
    what comes of the arguments that newer releases have."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    ascend_bed.repatch(pipeline_num_transformer_layers=[[3], [1]])
    config = config_class("TransformerConfig")(
        **SIZES, pipeline_model_parallel_size=2, pipeline_dtype="float32"
    )
    layers = helper("get_num_layers_to_build")
    offset = helper("get_transformer_layer_offset")

    def ask() -> list[Any]:
        return [layers(config), offset(config), TransformerLayer._get_layer_offset(config)]

    out = {
        "unaligned": [on_stage(rank, 2, ask) for rank in range(2)],
        "unaligned, vp_stage": on_stage(0, 2, lambda: layers(config, vp_stage=0)),
    }
    ascend_bed.repatch(pipeline_num_transformer_layers=None)
    return out


def strings(ascend_bed: Any) -> dict[str, Any]:
    """Case 89: a string where the config has an enum."""
    ascend_bed.repatch(attention_backend="flash")
    answer = outcome(lambda: repr(config_class("TransformerConfig")(**SIZES).attention_backend))
    del ascend_bed.mindspeed_args().attention_backend
    ascend_bed.repatch()
    return {"strings": answer}


def registered_twice() -> Any:
    """Case 88, of a wrapper and of a replacement."""
    place = "megatron.core.transformer.transformer_block.get_num_layers_to_build"

    def some_wrapper(fn: Any) -> Any:
        return fn

    def replacement(config: Any) -> int:
        return 1

    def twice(new: Any) -> str:
        for _ in range(2):
            manager().register_patch(place, new)
        return "accepted"

    answers = [outcome(lambda: twice(some_wrapper)), outcome(lambda: twice(replacement))]
    forced = outcome(lambda: manager().register_patch(place, replacement, force_patch=True))
    return [*answers, forced]


if __name__ == "__main__":
    assert FLAGS[0] == NAME
    report(main)
