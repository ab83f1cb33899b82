"""`--schedules-method dualpipev`: the model is folded, a rank has a chunk of either half.

The offset is that of the chunk which a process-wide switch names; after the model is built it
names the second, whose offset both chunks then have. Both helpers take nothing but the config.
"""

from typing import Any

from megatron.core import parallel_state

first_chunk = False


def get_num_layers_to_build(config: Any) -> int:
    layers: int = config.num_layers // config.pipeline_model_parallel_size // 2
    return layers


def get_transformer_layer_offset(config: Any) -> int:
    rank, here = parallel_state.get_pipeline_model_parallel_rank(), get_num_layers_to_build(config)
    offset: int = rank * here if first_chunk else config.num_layers - (rank + 1) * here
    return offset
