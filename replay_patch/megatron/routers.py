"""Which router is which: the routers that a model really runs.
Nothing here keeps a router alive, or goes by a position in a list."""

import re
from typing import Any

from replay_patch.errors import LayoutError

_MTP_BLOCK = re.compile(r"(?:^|\.)mtp\.layers\.(\d+)(?:\.|$)")


def routers(chunk: Any) -> dict[tuple[int, int], Any]:
    """The `TopKRouter`s that are attached to a model or chunk, wrapped or not, now.

    The keys are (layer_number, mtp_depth). Depth 0 is the decoder, else the place of the block in
    `mtp.layers`, from 1. (Layer numbers alone are ambiguous: on most releases those of MTP blocks
    start again at 1.) Routers of a decoder that was built and replaced are not attached, and a
    router reached twice is one. Where a wrapper has a `language_model`, only those inside of it
    count. Raises LayoutError for two routers with one key (it names both), or one without a number.
    """
    from megatron.core.transformer.moe.router import TopKRouter

    modules = dict(chunk.named_modules())
    if any(_in_language_model(path) for path in modules):
        modules = {path: m for path, m in modules.items() if _in_language_model(path)}
    paths: dict[tuple[int, int], str] = {}
    for path, module in modules.items():
        if not isinstance(module, TopKRouter):
            continue
        number = module.layer_number
        if number is None:
            raise LayoutError(
                f"the router {path} of {type(chunk).__name__} has layer_number None: expected "
                "Megatron's number; call set_layer_number() where the layer is built"
            )
        block = _MTP_BLOCK.search(path)
        key = int(number), int(block[1]) + 1 if block else 0
        if key in paths:
            raise LayoutError(
                f"two routers of {type(chunk).__name__} are layer {key[0]}"
                f"{f' of MTP block {key[1]}' if block else ''}: {paths[key]} and {path}; expected "
                "one decoder in a model. Pass the part of the model that is to be replayed"
            )
        paths[key] = path
    return {key: modules[paths[key]] for key in sorted(paths, key=lambda k: (k[1], k[0]))}


def decoder_routers(chunk: Any) -> dict[int, Any]:
    """The routers of the decoder, by layer number, in order; see `routers`."""
    return {number: router for (number, depth), router in routers(chunk).items() if not depth}


def _in_language_model(path: str) -> bool:
    return "language_model" in path.split(".")
