"""With a pipeline layout, both helpers answer for the stage of this process, whatever is asked."""

import functools
from collections.abc import Callable
from typing import Any

from megatron.core import parallel_state


def get_num_layers_to_build_wrapper(fn: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(fn)
    def wrapper(config: Any, *args: Any, **kwargs: Any) -> int:
        layout = _layout(config)
        if layout is None:
            return fn(config, *args, **kwargs)
        rank = parallel_state.get_pipeline_model_parallel_rank()
        virtual = parallel_state.get_virtual_pipeline_model_parallel_rank() or 0
        return _decoders(layout[rank][virtual])

    return wrapper


def get_transformer_layer_offset_wrapper(fn: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(fn)
    def wrapper(config: Any, *args: Any, **kwargs: Any) -> int:
        layout = _layout(config)
        if layout is None:
            return fn(config, *args, **kwargs)
        rank = parallel_state.get_pipeline_model_parallel_rank()
        virtual = parallel_state.get_virtual_pipeline_model_parallel_rank() or 0
        order = [(v, r) for v in range(len(layout[0])) for r in range(len(layout))]
        before = order[: order.index((virtual, rank))]
        return sum(_decoders(layout[r][v]) for v, r in before)

    return wrapper


def _layout(config: Any) -> Any:
    """[rank][virtual stage][layers], or None."""
    found = getattr(config, "pipeline_model_parallel_layout", None)
    return getattr(found, "layout", found)


def _decoders(layers: Any) -> int:
    return sum(getattr(layer, "name", layer) == "decoder" for layer in layers)
