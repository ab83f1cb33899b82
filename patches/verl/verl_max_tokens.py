"""verl's vLLM server generates `response_length` tokens at most, and at least one.

`verl_max_tokens_sglang` is the same for its SGLang server. A response of known length limit gives
`routed_experts` one shape.
"""

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

from replay_patch.patching import probe
from replay_patch.patching.patch import Patch
from replay_patch.patching.transaction import Transaction

_MODULE = "verl.workers.rollout.vllm_rollout.vllm_async_server"
_SERVERS = (f"{_MODULE}:vLLMHttpServerBase", f"{_MODULE}:vLLMHttpServer")  # 0.7.0, later
_KEYS = ("max_tokens", "max_new_tokens")


def needed(servers: tuple[str, ...]) -> tuple[bool, str]:
    """Whether a server asks for more than it may, or for nothing."""
    owners = _owners(servers)
    for short, full in (_asked(vars(owner)["generate"]) for owner in owners):
        found = f"{short} tokens are asked for where 8 are allowed, {full} where none are left"
        if (short, full) != (8, 1):
            return True, found
    return False, found if owners else f"no generate() that is known in {', '.join(servers)}"


def apply(transaction: Transaction, servers: tuple[str, ...], spare: int) -> None:
    """Bound what is asked for. `spare`: tokens of the context that stay empty."""
    for owner in _owners(servers):
        transaction.wrap(owner, "generate", functools.partial(_bounded, spare))


def _owners(servers: tuple[str, ...]) -> list[Any]:
    """The classes that have the servers' `generate`. A Ray actor has a copy of its class inside."""
    owners = []
    for server in filter(None, map(probe.find, servers)):
        metadata = getattr(server, "__ray_metadata__", None)
        cls = metadata.modified_class if metadata else server
        owners += [base for base in cls.__mro__ if "generate" in vars(base)][:1]
    return [cls for cls in dict.fromkeys(owners) if _known(vars(cls)["generate"])]


def _known(generate: Any) -> bool:
    return {"prompt_ids", "sampling_params"} <= inspect.signature(generate).parameters.keys()


def _asked(generate: Any) -> tuple[Any, Any]:
    """What is asked of the engine after 1 and after 12 tokens, where a prompt may have 4 and a
    response 8. None: it needs more of a server to get there.

    The method is run up to its request, with a function in the place of the request's class.
    """
    asked: list[Any] = []

    class Stop(Exception):
        pass

    def request(**given: Any) -> None:
        parameters = given.get("sampling_params", given)
        asked.append(next((parameters[key] for key in _KEYS if key in parameters), None))
        raise Stop

    function = inspect.unwrap(generate)
    names = {"SamplingParams": request, "GenerateReqInput": request}
    copy = types.FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        argdefs=function.__defaults__,
        closure=function.__closure__,
    )
    for tokens in (1, 12):
        call = copy(_Idle(), prompt_ids=[0] * tokens, sampling_params={}, request_id="")
        try:
            call.send(None)
        except Stop:
            continue
        except Exception:  # noqa: BLE001 - code of any release
            pass
        finally:
            call.close()
        asked.append(None)
    return asked[0], asked[1]


class _Idle:
    """A server, and its settings, of which only the lengths are known."""

    response_length, prompt_length, max_model_len = 8, 4, 100

    @property
    def config(self) -> "_Idle":
        return self

    def get(self, name: str, default: Any = None) -> Any:
        return default

    def __getattr__(self, name: str) -> None:
        return None


def _bounded(spare: int, original: Callable[..., Any]) -> Callable[..., Any]:
    from replay_patch.routes.trajectory import flat

    signature = inspect.signature(original)

    async def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = signature.bind(self, *args, **kwargs)
        held, config = len(flat(call.arguments["prompt_ids"])), self.config
        given = dict(call.arguments["sampling_params"])  # the caller has it for the next turn too
        said = [given.pop(key) for key in _KEYS if key in given]
        wanted = next((limit for limit in said if limit is not None), None)
        if wanted is None:
            left = config.prompt_length + config.response_length - held
            wanted = min(config.response_length, left)
        fits = config.max_model_len - held - spare
        given["max_tokens"] = min(max(1, wanted), max(0, fits))
        call.arguments["sampling_params"] = given
        return await original(*call.args, **call.kwargs)

    return generate


HOW = (
    "`generate` is given `max_tokens`: the caller's if it says one, else `response_length` or what "
    "is left of prompt and response together; no more than fits into the model's context, and no "
    "less than 1. Where nothing fits, verl's own answer stands."
)

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
    how=HOW,
    upstream="none: from 0.8 on verl asks vLLM for at least one token",
    remove_when="every supported verl asks vLLM for 1 ... response_length tokens by itself",
    needed=functools.partial(needed, servers=_SERVERS),
    apply=functools.partial(apply, servers=_SERVERS, spare=0),
)
