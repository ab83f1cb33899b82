"""Without this patch verl's SGLang server generates responses that are cut off afterwards, or asks
for 0 tokens, and then gets a log-probability without a token."""

from replay_patch.patches.verl._max_tokens import max_tokens_patch

PATCH = max_tokens_patch(
    name="verl_max_tokens_sglang",
    engine="SGLang",
    module="verl.workers.rollout.sglang_rollout.async_sglang_server",
    classes=("SGLangHttpServer",),
    why=(
        "All releases ask for 0 tokens where a multi-turn loop has none left, and SGLang then "
        "returns a log-probability without a token."
    ),
    upstream="none known: verl 0.9.1 still asks SGLang for 0 tokens",
    spare=1,  # verl 0.8 and later keep one token of SGLang's context free
)
