"""Without this patch the routes of a generation that verl aborted and resumed are put behind each
other by number: one call without routes shifts all after it to other tokens."""

from collections.abc import Callable
from typing import Any

from replay_patch.patching import Patch, Transaction, probe

_NAME = "FullyAsyncLLMServerClient"
_MODULES = (
    "verl.experimental.fully_async_policy.fully_async_rollouter",  # 0.8
    "verl.workers.rollout.llm_server",  # 0.9
)


def _client() -> Any:
    clients = [probe.find(f"{module}:{_NAME}") for module in _MODULES]
    return next((client for client in clients if client is not None), None)


def _needed() -> tuple[bool, str]:
    generate = vars(_client() or object).get("generate")
    merges = "routed_experts" in probe.names_used(generate)
    return merges, f"{_NAME} {'puts' if merges else 'does not put'} rows together by their number"


def _apply(transaction: Transaction) -> None:
    transaction.wrap(_client(), "generate", _generate_with_routes_by_token)


def _generate_with_routes_by_token(original: Callable[..., Any]) -> Callable[..., Any]:
    from replay_patch.routes.trajectory import Trajectory, current, flat

    async def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        whole = current.get()
        if whole is None:
            return await original(self, *args, **kwargs)
        part = Trajectory(whole.name, whole.unwanted, merged_by_caller=True)
        before = current.set(part)
        try:
            output = await original(self, *args, **kwargs)
        finally:
            current.reset(before)
        whole.extend(part)
        output.routed_experts = part.routes([*flat(kwargs["prompt_ids"]), *output.token_ids])
        return output

    return generate


PATCH = Patch(
    name="verl_resumed_routes",
    library="verl",
    targets=tuple(f"{module}:{_NAME}.generate" for module in _MODULES),
    modules=_MODULES,
    requires="verl",
    why=(
        "A resumed generation returns rows for the whole sequence, and verl appends as many of the "
        "last as there are new tokens. 0.8.0 fails on vLLM's arrays (`torch.cat`); with 0.9 one "
        "call without routes shifts all rows after it to other tokens, silently."
    ),
    how=(
        "The rows of all calls of one generation are put together by token, as in "
        "`verl_rollout_routes`; verl's own merging gets none."
    ),
    upstream="https://github.com/volcengine/verl/pull/6046",
    remove_when="verl puts rows at tokens, not behind each other",
    needed=_needed,
    apply=_apply,
)
