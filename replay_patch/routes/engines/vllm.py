"""vLLM, started with `enable_return_routed_experts`: a completion has `routed_experts`, for all
layers of the model. vLLM 0.21 has the rows of the prompt in a field of their own, and both fields
for MoE layers only."""

from replay_patch.routes.responses.engine import Engine

ENGINE = Engine(
    fields=("routed_experts",),
    layers="all",
    switch="enable_return_routed_experts",
    prompt_field="prompt_routed_experts",
    layers_if_split="moe",
)
