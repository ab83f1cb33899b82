"""Other ids give what the release's own code gives when it is made to pick them."""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import megatron.core.transformer.moe.moe_utils as moe_utils
import megatron.core.transformer.moe.router as router_module
import pytest
import torch
from helpers.exactness import (
    NATIVE_REPLAY,
    ORIGINAL_TOPK,
    TOPK,
    act,
    determinism,
    differing,
    every_case,
    make_input,
    make_router,
    run,
    some_ids,
)
from helpers.routers import BACKWARD, FORWARD
from megatron.core.transformer.moe.router_replay import RouterReplay
from torch import Tensor


@contextlib.contextmanager
def release_picking(ids: Tensor) -> Iterator[None]:
    """The unpatched release, made to pick `ids` without any code of ours.

    Before 0.16 its selection, `torch.topk` or `group_limited_topk`, is answered with `ids` the
    first time; from 0.16 on its own RouterReplay replays them.
    """
    with contextlib.ExitStack() as stack:

        def put(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, value))

        put(router_module, TOPK, ORIGINAL_TOPK)
        if NATIVE_REPLAY:
            put(RouterReplay, "get_replay_topk", inspect.unwrap(RouterReplay.get_replay_topk))
        else:
            waiting = [ids]
            put(moe_utils, "group_limited_topk", answering(waiting, moe_utils.group_limited_topk))
            put(torch, "topk", answering(waiting, torch.topk))
        yield


def answering(waiting: list[Tensor], original: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, but a call takes the ids that are waiting, if any are."""

    def select(*args: Any, **kwargs: Any) -> Any:
        if not waiting:
            return original(*args, **kwargs)
        ids, candidates = waiting.pop(), args[0] if args else kwargs["scores"]
        return candidates.gather(1, ids), ids

    return select


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@every_case
def test_replay_is_the_release_made_to_pick_the_ids_bitwise(
    case: str, precision: str, deterministic: bool
) -> None:
    router = make_router(case, precision, seed=2)
    replay, given_, ids = router.router_replay, make_input(router), some_ids(router.topk)
    replay.set_target_indices(ids)

    with determinism(deterministic):
        replayed = act(router, FORWARD, *given_)
        recomputed = act(router, BACKWARD, *given_)
        replay.target_topk_idx = ids
        replay.router_replay_action = FORWARD if NATIVE_REPLAY else None
        with (
            release_picking(ids),
            mock.patch.object(
                router_module.TopKRouter,
                "forward",
                inspect.unwrap(router_module.TopKRouter.forward),
            ),
        ):
            expected = run(router, *given_)

    assert differing(expected, replayed) == []
    assert differing(expected, recomputed) == []
