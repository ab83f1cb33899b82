"""What verl's passes with routing replay need wherever they run: in its engine, in the actor beside
it (0.7), and in the helpers that both call."""

import ast
import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

from replay_patch import refusals
from replay_patch.errors import RouteError
from replay_patch.patching import probe
from replay_patch.patching.rebinding import Instead, with_globals

replay_objects: ContextVar[list[Any] | None] = ContextVar("replay objects of a model", default=None)
"""The replay objects of the model whose pass is running; None outside of passes."""


@contextlib.contextmanager
def routers_of(model_chunks: Sequence[Any]) -> Iterator[None]:
    """Within it verl's helpers mean the decoder routers of this model (`verl_router_lists`)."""
    from replay_patch.megatron.routers import decoder_routers

    routers = [router for chunk in model_chunks for router in decoder_routers(chunk).values()]
    objects = [router.router_replay for router in routers if router.router_replay is not None]
    token = replay_objects.set(objects)
    try:
        yield
    finally:
        replay_objects.reset(token)


def clears_in_finally(target: str) -> bool:
    """Whether a pass clears actions and recordings of all routers however it ends."""
    tries = [n for n in ast.walk(ast.parse(probe.source(target))) if isinstance(n, ast.Try)]
    return any("clear_global" in ast.unparse(line) for each in tries for line in each.finalbody)


@contextlib.contextmanager
def cleared_after_error(owner: Any) -> Iterator[None]:
    """After an exception, drop actions, targets and recordings, which a later pass would take."""
    try:
        yield
    except BaseException:
        replay = sys.modules["verl.utils.megatron.router_replay_patch"].RouterReplay
        replay.clear_global_router_replay_action()
        with contextlib.suppress(RouteError):  # what was wrong with ids; the first error is raised
            replay.clear_global_indices()
        if hasattr(owner, "mini_layer_topk_idx_list"):
            owner.mini_layer_topk_idx_list = []
        raise


def refuse_padded(setting: str) -> None:
    """Raise RouteError: rows of padded sequences are not those of packed ones."""
    raise RouteError(
        f"{refusals.installed_megatron()}, verl: routing replay with padded sequences (bshd) and "
        "more than one of them in a microbatch; verl lays routes out as rows of packed sequences, "
        "so tokens would get each other's experts. "
        f"Set {setting}=True, or a micro batch size of 1 and no dynamic batch size"
    )


def warn_of_one_expert(config: Any, mode: str) -> None:
    """Warn once that with one expert per token zeros may be a route or none."""
    if mode == "R3" and config.moe_router_topk == 1:
        refusals.warn_once(
            "verl, R3 with one expert per token: a rollout without this plugin fills rows that it "
            "did not capture with zeros, which is a valid route: where verl does not mask them, "
            "such tokens go to expert 0. With the plugin there the rows are -1, and route natively"
        )


def casts_to_uint8(function: Any) -> bool:
    """Whether it narrows ids; from 0.9 on verl only views int16 as bytes. Read and not called: it
    gathers recorded ids over process groups, too."""
    return ".to(torch.uint8)" in probe.source(function)


def wide_ids(original: Callable[..., Any]) -> Callable[..., Any]:
    """A function that casts recorded ids to uint8: with over 256 experts to int32 instead, which
    every release's collectives take. An argument that is or has a `tf_config` says how many."""
    if not casts_to_uint8(original):
        return original
    import torch

    @functools.wraps(original, updated=())
    def with_wide_ids(*args: Any, **kwargs: Any) -> Any:
        configs = [getattr(a, "tf_config", a) for a in (*args, *kwargs.values())]
        experts = [n for c in configs if isinstance(n := getattr(c, "num_moe_experts", 0), int)]
        if max(experts, default=0) <= 256:
            return original(*args, **kwargs)
        names = {"torch": Instead(torch, uint8=torch.int32)}
        return with_globals(original, names)(*args, **kwargs)

    return with_wide_ids
