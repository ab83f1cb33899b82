"""Without this patch verl's vLLM server generates responses that are cut off afterwards, or asks
for 0 tokens, which vLLM refuses."""

from replay_patch.patches.verl._max_tokens import max_tokens_patch

PATCH = max_tokens_patch(
    name="verl_max_tokens",
    engine="vLLM",
    module="verl.workers.rollout.vllm_rollout.vllm_async_server",
    classes=("vLLMHttpServerBase", "vLLMHttpServer"),  # 0.7.0, later
    why="0.7 asks for 0 tokens where none are left, which vLLM refuses.",
    upstream="none: from 0.8 on verl asks vLLM for at least one token",
    spare=0,
)
