"""`--moe-tp-extend-ep`: the routing of core 0.12 on the tokens of all tensor-parallel ranks.

A full replacement of the method. The top-k function is bound when this module is imported.
"""

from typing import Any

from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.moe.moe_utils import topk_softmax_with_capacity


def routing_tp_extend_ep(self: Any, logits: Any) -> tuple[Any, Any]:
    config = self.config
    logits = self.apply_z_loss(logits.view(-1, config.num_moe_experts))
    logits = gather_from_sequence_parallel_region(logits)
    if self.routing_type == "aux_loss":
        scores, routing_map = self.aux_loss_load_balancing(logits)
    else:
        scores, routing_map, _ = topk_softmax_with_capacity(
            logits,
            self.topk,
            capacity_factor=config.moe_expert_capacity_factor,
            pad_to_capacity=config.moe_pad_expert_input_to_capacity,
            drop_policy=config.moe_token_drop_policy,
            use_pre_softmax=config.moe_router_pre_softmax,
            num_groups=config.moe_router_num_groups,
            group_topk=config.moe_router_group_topk,
            scaling_factor=config.moe_router_topk_scaling_factor,
            deterministic_mode=config.deterministic_mode,
            score_function=self.score_function,
            expert_bias=self.expert_bias,
        )
    size = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    return scores.chunk(size)[rank], routing_map.chunk(size)[rank]
