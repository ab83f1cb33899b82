"""`--pipeline-num-transformer-layers [[3],[1]]`: a list of each rank's virtual stages.

Both know only the stage of this process, and take nothing but the config.
"""

from typing import Any

from megatron.core import parallel_state


def get_num_layers_to_build_unaligned(config: Any) -> int:
    rank = parallel_state.get_pipeline_model_parallel_rank()
    virtual = parallel_state.get_virtual_pipeline_model_parallel_rank() or 0
    layers: int = config.pipeline_num_transformer_layers[rank][virtual]
    return layers


def get_layer_offset_unaligned(config: Any) -> int:
    """Of the first virtual stages come all ranks, then of the second."""
    rank = parallel_state.get_pipeline_model_parallel_rank()
    virtual = parallel_state.get_virtual_pipeline_model_parallel_rank() or 0
    table = config.pipeline_num_transformer_layers
    order = [(v, r) for v in range(len(table[0])) for r in range(len(table))]
    return sum(table[r][v] for v, r in order[: order.index((virtual, rank))])
