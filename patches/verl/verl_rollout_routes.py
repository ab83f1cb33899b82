"""Without this patch some of verl's agent loops lose the routes of the rollout, or hand on those of
an earlier turn, and tokens without a route are replayed as expert 0."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

from replay_patch.errors import RouteError
from replay_patch.patching import Patch, Transaction, probe
from replay_patch.patching.wrappers import chain

_log = logging.getLogger(__name__)

_MODULE = "verl.experimental.agent_loop.agent_loop"
_RUN = "_run_agent_loop"
_WORKERS = (f"{_MODULE}:AgentLoopWorkerBase", f"{_MODULE}:AgentLoopWorker")  # 0.7.0, later
_CLIENTS = (f"{_MODULE}:AsyncLLMServerManager", "verl.workers.rollout.llm_server:LLMServerClient")


def _needed() -> tuple[bool, str]:
    fields = getattr(probe.find(f"{_MODULE}:AgentLoopOutput"), "model_fields", {})
    named = sorted(name for name in fields if name.startswith("routed_experts"))
    return named == ["routed_experts"], f"an agent loop returns {named or 'no routes'}"


def _apply(transaction: Transaction) -> None:
    worker = _first(_WORKERS)
    for owner in [worker, *_copies(worker, vars(worker)[_RUN])]:
        transaction.wrap(owner, _RUN, _run_agent_loop_with_trajectory)
    transaction.wrap(_first(_CLIENTS), "generate", _generate_noting_routes)


def _copies(cls: Any, original: Any) -> Iterator[Any]:
    """Classes of actors that exist already: Ray copies all methods, also inherited ones."""
    for sub in cls.__subclasses__():
        if any(function is original for function in chain(vars(sub).get(_RUN))):
            yield sub
        yield from _copies(sub, original)


def _first(targets: tuple[str, ...]) -> Any:
    classes = [cls for cls in map(probe.find, targets) if cls is not None]
    if not classes:
        raise LookupError(f"none of {', '.join(targets)} is there")
    return classes[0]


def _run_agent_loop_with_trajectory(original: Callable[..., Any]) -> Callable[..., Any]:
    from replay_patch.routes.trajectory import Trajectory, current

    async def _run_agent_loop(
        self: Any, sampling_params: Any, trajectory: Any, **kwargs: Any
    ) -> Any:
        if not _replays(self):
            return await original(self, sampling_params, trajectory, **kwargs)
        if "_agent_loop_postprocess" not in vars(self):  # of the class it is, a user's too
            self._agent_loop_postprocess = _postprocess_with_routes(self._agent_loop_postprocess)
        routes = Trajectory(_name(trajectory, kwargs), unwanted=bool(trajectory["validate"]))
        before = current.set(routes)
        try:
            return await original(self, sampling_params, trajectory, **kwargs)
        finally:
            current.reset(before)

    return _run_agent_loop


def _replays(worker: Any) -> bool:
    rollout = getattr(worker, "rollout_config", None)
    if rollout is None:  # 0.7.0; later a config may have its rollout at another place
        rollout = worker.config.actor_rollout_ref.rollout
    return bool(getattr(rollout, "enable_rollout_routing_replay", False))


def _name(trajectory: Any, kwargs: Any) -> str:
    fields = {"uid": kwargs.get("uid"), "session": kwargs.get("session_id"), **trajectory}
    fields.pop("validate")
    return "verl: " + ", ".join(
        f"{key} {value}" for key, value in fields.items() if value is not None
    )


def _generate_noting_routes(original: Callable[..., Any]) -> Callable[..., Any]:
    from replay_patch.routes.trajectory import current

    async def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = await original(self, *args, **kwargs)
        trajectory = current.get()
        if trajectory is not None and hasattr(output, "routed_experts"):
            if not trajectory.unwanted:
                trajectory.add(kwargs["prompt_ids"], output.token_ids, output.routed_experts)
            if trajectory.merged_by_caller:
                output.routed_experts = None
        return output

    return generate


def _postprocess_with_routes(postprocess: Callable[..., Any]) -> Callable[..., Any]:
    """A worker's method; without a trajectory, as after deactivation, it is as before."""
    from replay_patch.routes.trajectory import current

    async def _agent_loop_postprocess(output: Any, *args: Any, **kwargs: Any) -> Any:
        trajectory = current.get()
        if trajectory is not None and output is not None:
            for each in output if isinstance(output, list) else [output]:
                each.routed_experts = None if trajectory.unwanted else _routes(trajectory, each)
        return await postprocess(output, *args, **kwargs)

    return _agent_loop_postprocess


def _routes(trajectory: Any, output: Any) -> Any:
    tokens = [*output.prompt_ids, *output.response_ids]
    response = enumerate(output.response_mask, len(output.prompt_ids))
    sampled = [token for token, by_model in response if by_model]
    routes = trajectory.routes(tokens)
    if routes is None and output.routed_experts is not None:
        routes = _routes_of_loop(trajectory.name, output.routed_experts, tokens, sampled)
    if routes is None or (sampled and (routes < 0).all()):
        raise RouteError(
            f"{trajectory.name}: no token has routed_experts, though "
            "rollout.enable_rollout_routing_replay is on; expected rows for all but the last "
            "token. Does this engine return them (vLLM: enable_return_routed_experts), and for "
            "these tokens? A loop that generates in threads of its own has to hand them on"
        )
    missing = sum(1 for token in sampled[:-1] if (routes[token] < 0).any())
    if missing:
        _log.warning(
            "%s: %d of %d sampled tokens have no routed_experts; the trainer routes these natively",
            trajectory.name,
            missing,
            len(sampled),
        )
    return routes


def _routes_of_loop(name: str, rows: Any, tokens: list[int], sampled: list[int]) -> Any:
    """Routes that a loop got without verl's client; only their number tells if some are missing."""
    from replay_patch.routes.trajectory import Trajectory

    least = sampled[-1] if sampled else 0
    if not least <= len(rows) <= len(tokens):
        raise RouteError(
            f"{name}: its agent loop returns {len(rows)} rows of routed_experts for {len(tokens)} "
            f"tokens, of which the model sampled token {least} last; expected at least {least}, "
            "from the first token of the prompt on: fill up with -1 where there are none"
        )
    part = Trajectory(name)
    part.add(tokens[: len(rows) + 1], [], rows)
    return part.routes(tokens)


PATCH = Patch(
    name="verl_rollout_routes",
    library="verl",
    targets=(
        *(f"{worker}.{_RUN}" for worker in _WORKERS),
        *(f"{client}.generate" for client in _CLIENTS),
    ),
    modules=(_MODULE,),
    requires="verl",
    why=(
        "Each of verl's agent loops hands on `routed_experts` by itself: 0.7.0's tool loop leaves "
        "it out; one of several turns without routes leaves the rows of the turn before; and where "
        "a sample has none, the batch is without, or `torch.cat` fails far from the cause. Tokens "
        "without a row get zeros, which are ids of expert 0."
    ),
    how=(
        "With `enable_rollout_routing_replay`, what the client's `generate` returns is noted for "
        "each trajectory, and before a loop's output is padded its `routed_experts` is made from "
        "that: a row for each token, compared by token ids, -1 where there is none. A sample "
        "without any is one error that names it. Validation gets no routes."
    ),
    upstream="none known: verl 0.9.1 still fills in zeros",
    remove_when="verl's agent loops say themselves which rows are captured",
    needed=_needed,
    apply=_apply,
)
