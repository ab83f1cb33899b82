"""verl's SGLang server generates `response_length` tokens at most, and at least one."""

import functools

from replay_patch.patches.verl import verl_max_tokens
from replay_patch.patching.patch import Patch

_MODULE = "verl.workers.rollout.sglang_rollout.async_sglang_server"
_SERVERS = (f"{_MODULE}:SGLangHttpServer",)

PATCH = Patch(
    name="verl_max_tokens_sglang",
    library="verl",
    targets=tuple(f"{server}.generate" for server in _SERVERS),
    modules=(_MODULE,),
    requires="verl",
    why=(
        "As `verl_max_tokens`, for verl's SGLang server: 0.7.0 lets a response grow where the "
        "prompt is short. All releases ask for 0 tokens where a multi-turn loop has none left, and "
        "SGLang then returns a log-probability without a token."
    ),
    how=verl_max_tokens.HOW,
    upstream="none known: verl 0.9.1 still asks SGLang for 0 tokens",
    remove_when="every supported verl asks SGLang for 1 ... response_length tokens by itself",
    needed=functools.partial(verl_max_tokens.needed, servers=_SERVERS),
    # verl 0.8 and later keep one token of SGLang's context free.
    apply=functools.partial(verl_max_tokens.apply, servers=_SERVERS, spare=1),
)
