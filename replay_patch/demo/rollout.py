"""The rollout engine of the demo: a model that writes responses and captures its routes."""

from dataclasses import dataclass
from typing import Any

from replay_patch.demo.model import (
    Sizes,
    as_map,
    positions,
    replay_objects,
    stacked,
    watch_routing_maps,
)
from replay_patch.errors import ReplayPatchError


@dataclass(frozen=True)
class Rollout:
    """What the rollout engine hands to the trainer (S = length, B = sequences)."""

    tokens: Any  # int64 [B, S]
    log_probs: Any  # float32 [B, S - prompt, vocabulary], of the response tokens
    routes: Any  # int64 [S, B, layers, topk]; zeros where nothing was captured
    captured: Any  # bool [S, B]


def roll_out(engine: Any, sizes: Sizes, generator: Any) -> Rollout:
    """Sample a response to each random prompt, and record the routes of every token fed. A token's
    route is what its routers chose when it was new, as with an engine that keeps a KV cache. The
    last token sampled is never fed, so it has none."""
    import torch
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    shape = (sizes.sequences, sizes.length)
    tokens = torch.randint(0, sizes.vocabulary, shape, generator=generator)
    log_probs = torch.empty(shape[0], shape[1] - sizes.prompt, sizes.vocabulary)
    routes = torch.zeros(*reversed(shape), sizes.layers, sizes.topk, dtype=torch.int64)
    captured = torch.zeros(*reversed(shape), dtype=torch.bool)
    maps = watch_routing_maps(engine)
    for replay in replay_objects(engine):
        replay.set_router_replay_action(RouterReplayAction.RECORD)
    with torch.no_grad():
        for fed in range(sizes.prompt, sizes.length):
            logits = engine(tokens[:, :fed], positions(tokens[:, :fed]), None)
            recorded = torch.stack(
                [r.get_recorded_indices() for r in replay_objects(engine)], dim=1
            )
            if not torch.equal(as_map(recorded, sizes.experts), stacked(maps)):
                raise ReplayPatchError("demo: the recorded ids are not what the routers used")
            # Router rows are sequence-major: row = position * sequences + sequence.
            recorded = recorded.view(fed, shape[0], sizes.layers, sizes.topk)
            new = slice(0 if fed == sizes.prompt else fed - 1, fed)
            routes[new], captured[new] = recorded[new], True
            next_token = logits[:, -1].float().log_softmax(-1)
            log_probs[:, fed - sizes.prompt] = next_token
            tokens[:, fed] = torch.multinomial(next_token.exp(), 1, generator=generator)[:, 0]
    return Rollout(tokens, log_probs, routes, captured)
