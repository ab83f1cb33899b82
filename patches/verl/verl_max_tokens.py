"""Without this patch verl's vLLM server generates responses that are cut off afterwards, or asks
for 0 tokens, which vLLM refuses."""

import functools

from replay_patch.patches.verl import _max_tokens
from replay_patch.patching import Patch

_MODULE = "verl.workers.rollout.vllm_rollout.vllm_async_server"
_SERVERS = (f"{_MODULE}:vLLMHttpServerBase", f"{_MODULE}:vLLMHttpServer")  # 0.7.0, later

PATCH = Patch(
    name="verl_max_tokens",
    library="verl",
    targets=tuple(f"{server}.generate" for server in _SERVERS),
    modules=(_MODULE,),
    requires="verl",
    why=(
        "verl 0.7.0 lets a response be as much longer as its prompt is shorter than the longest "
        "one: `routed_experts` has rows for tokens that are cut off afterwards, and no common "
        "shape. 0.7 asks for 0 tokens where none are left, which vLLM refuses."
    ),
    how=_max_tokens.HOW,
    upstream="none: from 0.8 on verl asks vLLM for at least one token",
    remove_when="every supported verl asks vLLM for 1 ... response_length tokens by itself",
    needed=functools.partial(_max_tokens.needed, servers=_SERVERS),
    apply=functools.partial(_max_tokens.apply, servers=_SERVERS, spare=0),
)
