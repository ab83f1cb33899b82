"""Without this patch verl's SGLang server generates responses that are cut off afterwards, or asks
for 0 tokens, and then gets a log-probability without a token."""

import functools

from replay_patch.patches.verl import _max_tokens
from replay_patch.patching import Patch

_MODULE = "verl.workers.rollout.sglang_rollout.async_sglang_server"
_SERVERS = (f"{_MODULE}:SGLangHttpServer",)

PATCH = Patch(
    name="verl_max_tokens_sglang",
    library="verl",
    targets=tuple(f"{server}.generate" for server in _SERVERS),
    modules=(_MODULE,),
    requires="verl",
    why=(
        "verl 0.7.0 lets a response be as much longer as its prompt is shorter than the longest "
        "one: `routed_experts` has rows for tokens that are cut off afterwards, and no common "
        "shape. All releases ask for 0 tokens where a multi-turn loop has none left, and SGLang "
        "then returns a log-probability without a token."
    ),
    how=_max_tokens.HOW,
    upstream="none known: verl 0.9.1 still asks SGLang for 0 tokens",
    remove_when="every supported verl asks SGLang for 1 ... response_length tokens by itself",
    needed=functools.partial(_max_tokens.needed, servers=_SERVERS),
    # verl 0.8 and later keep one token of SGLang's context free.
    apply=functools.partial(_max_tokens.apply, servers=_SERVERS, spare=1),
)
