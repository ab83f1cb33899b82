"""How many tokens verl's rollout servers ask their engines for: 1 ... `response_length`.

A response of known length limit gives `routed_experts` one shape.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from replay_patch.patching import Patch, Transaction, probe
from replay_patch.patching.rebinding import with_globals

_KEYS = ("max_tokens", "max_new_tokens")


def max_tokens_patch(
    name: str,
    engine: str,
    module: str,
    classes: tuple[str, ...],
    why: str,
    upstream: str,
    spare: int,
) -> Patch:
    """The patch of one engine's servers. `spare`: tokens of the context that stay empty."""
    servers = tuple(f"{module}:{cls}" for cls in classes)
    return Patch(
        name=name,
        library="verl",
        targets=tuple(f"{server}.generate" for server in servers),
        modules=(module,),
        requires="verl",
        why=(
            "verl 0.7.0 lets a response be as much longer as its prompt is shorter than the "
            "longest one: `routed_experts` has rows for tokens that are cut off afterwards, and no "
            f"common shape. {why}"
        ),
        how=(
            "`generate` is given `max_tokens`: the caller's if it says one, else `response_length` "
            "or what is left of prompt and response together; no more than fits into the model's "
            "context, and no less than 1. Where nothing fits, verl's own answer stands."
        ),
        upstream=upstream,
        remove_when=(
            f"every supported verl asks {engine} for 1 ... response_length tokens by itself"
        ),
        needed=functools.partial(_needed, servers),
        apply=functools.partial(_apply, servers=servers, spare=spare),
    )


def _needed(servers: tuple[str, ...]) -> tuple[bool, str]:
    """Whether a server requests more tokens than it may, or none."""
    owners = _owners(servers)
    for owner in owners:
        short, full = (_requested(vars(owner)["generate"], prompt) for prompt in (1, 12))
        reason = f"{short} tokens are asked for where 8 are allowed, {full} where none are left"
        if (short, full) != (8, 1):
            return True, reason
    return False, reason if owners else f"no generate() that is known in {', '.join(servers)}"


def _apply(transaction: Transaction, servers: tuple[str, ...], spare: int) -> None:
    for owner in _owners(servers):
        transaction.wrap(owner, "generate", lambda original: _bounded_generate(original, spare))


def _bounded_generate(original: Callable[..., Any], spare: int) -> Callable[..., Any]:
    """`generate` with `max_tokens` set, as the patch's `how` says."""
    from replay_patch.routes.trajectory import flat

    signature = inspect.signature(original)

    async def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = signature.bind(self, *args, **kwargs)
        prompt, config = len(flat(call.arguments["prompt_ids"])), self.config
        sampling = dict(call.arguments["sampling_params"])  # the caller has it for the next turn
        limits = [sampling.pop(key) for key in _KEYS if key in sampling]
        limit = next((limit for limit in limits if limit is not None), None)
        if limit is None:
            left = config.prompt_length + config.response_length - prompt
            limit = min(config.response_length, left)
        fits = config.max_model_len - prompt - spare
        sampling["max_tokens"] = min(max(1, limit), max(0, fits))
        call.arguments["sampling_params"] = sampling
        return await original(*call.args, **call.kwargs)

    return generate


def _owners(servers: tuple[str, ...]) -> list[Any]:
    """The classes that define the servers' `generate`, of those that take what we know."""
    owners: dict[Any, None] = {}
    for server in filter(None, map(probe.find, servers)):
        owner = next((cls for cls in server.__mro__ if "generate" in vars(cls)), None)
        known = {"prompt_ids", "sampling_params"}
        if owner and known <= probe.parameters(vars(owner)["generate"]):
            owners[owner] = None
    return list(owners)


def _requested(generate: Any, prompt: int) -> Any:
    """How many tokens `generate` requests after a prompt of so many, where a prompt may have 4 and
    a response 8; None: it needs more of a server. It runs only up to its request: the class of
    that is replaced by a function."""
    requested: list[Any] = []

    class Stop(Exception):
        pass

    def request(**fields: Any) -> None:
        parameters = fields.get("sampling_params", fields)
        requested.append(next((parameters[key] for key in _KEYS if key in parameters), None))
        raise Stop

    names = {"SamplingParams": request, "GenerateReqInput": request}
    run = with_globals(probe.unwrapped(generate), names)
    call = run(_IdleServer(), prompt_ids=[0] * prompt, sampling_params={}, request_id="")
    try:
        call.send(None)
    except Exception:  # noqa: BLE001 - Stop, or code of any release
        pass
    finally:
        call.close()
    return requested[0] if requested else None


class _IdleServer:
    """A server, and its settings, of which only the lengths are known."""

    response_length, prompt_length, max_model_len = 8, 4, 100

    @property
    def config(self) -> "_IdleServer":
        return self

    def get(self, name: str, default: Any = None) -> Any:
        return default

    def __getattr__(self, name: str) -> None:
        return None
