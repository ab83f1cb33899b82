"""For tests/distributed/megatron/test_layer_helpers.py."""

import functools
from collections.abc import Callable
from typing import Any


def wrapped_before() -> list[tuple[int, int]]:
    """(offset, layers) of both ranks, by helpers that other code has wrapped before activation."""
    from megatron.core.transformer import transformer_block, transformer_layer

    def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def stranger(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return stranger

    for module, name in (
        (transformer_layer, "get_transformer_layer_offset"),
        (transformer_block, "get_num_layers_to_build"),
    ):
        setattr(module, name, wrapped(getattr(module, name)))
    import replay_patch

    replay_patch.activate()
    from replay_patch.matrix import tiny

    config = tiny.moe_config(
        num_layers=5, pipeline_model_parallel_size=2, num_layers_in_first_pipeline_stage=2
    )
    return [
        (
            transformer_layer.get_transformer_layer_offset(config, pp_rank=rank),
            transformer_block.get_num_layers_to_build(config, pp_rank=rank),
        )
        for rank in range(2)
    ]
