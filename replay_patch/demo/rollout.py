"""The model of the demo, and its bf16 copy as a rollout engine."""

from dataclasses import dataclass
from typing import Any

from replay_patch.errors import ReplayPatchError
from replay_patch.matrix import tiny


@dataclass(frozen=True)
class Sizes:
    """Small enough for a minute on two slow cores.

    `init_std` is what makes random weights as touchy as trained ones: with it about one router
    decision in ten differs between bf16 and fp32, as in the models of the R3 paper.
    """

    layers: int = 6
    hidden: int = 64
    experts: int = 32
    topk: int = 4
    vocabulary: int = 256
    init_std: float = 0.14
    sequences: int = 24
    prompt: int = 16
    length: int = 64
    microbatches: int = 2
    steps: int = 4
    learning_rate: float = 1e-4


SIZES = Sizes()


@dataclass(frozen=True)
class Rollout:
    """What the rollout engine hands to the trainer (S = length, B = sequences)."""

    tokens: Any  # int64 [B, S]
    log_probs: Any  # float32 [B, S - prompt, vocabulary], of the response tokens
    routes: Any  # int64 [S, B, layers, topk]; zeros where nothing was captured
    captured: Any  # bool [S, B]


def build(sizes: Sizes, seed: int, dtype: Any) -> Any:
    """A GPTModel in `dtype` whose routers can record and replay."""
    import torch

    config = tiny.moe_config(
        num_layers=sizes.layers,
        hidden_size=sizes.hidden,
        ffn_hidden_size=sizes.hidden,
        num_moe_experts=sizes.experts,
        moe_router_topk=sizes.topk,
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        init_method_std=sizes.init_std,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        enable_routing_replay=True,
    )
    model = tiny.gpt_model(
        config, seed=seed, vocab_size=sizes.vocabulary, max_sequence_length=sizes.length
    )
    return model.to(dtype)


def roll_out(engine: Any, sizes: Sizes, generator: Any) -> Rollout:
    """Sample a response to each random prompt, and record the routes of every token fed.

    A token's route is what its routers chose when it was new, as with an engine that keeps a KV
    cache. The last token sampled is never fed, so it has none.
    """
    import torch
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    shape = (sizes.sequences, sizes.length)
    tokens = torch.randint(0, sizes.vocabulary, shape, generator=generator)
    log_probs = torch.empty(shape[0], shape[1] - sizes.prompt, sizes.vocabulary)
    routes = torch.zeros(*reversed(shape), sizes.layers, sizes.topk, dtype=torch.int64)
    captured = torch.zeros(*reversed(shape), dtype=torch.bool)
    maps = watch(engine)
    for replay in replays(engine):
        replay.set_router_replay_action(RouterReplayAction.RECORD)
    with torch.no_grad():
        for fed in range(sizes.prompt, sizes.length):
            logits = engine(tokens[:, :fed], positions(tokens[:, :fed]), None)
            recorded = torch.stack([r.get_recorded_indices() for r in replays(engine)], dim=1)
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


def watch(model: Any) -> dict[int, Any]:
    """Each layer's routing map, bool [rows, experts]: always that of its last forward."""
    maps: dict[int, Any] = {}
    for layer, router in enumerate(routers(model)):

        def keep(module: Any, inputs: Any, outputs: Any, layer: int = layer) -> None:
            maps[layer] = outputs[1].detach().bool()

        router.register_forward_hook(keep)
    return maps


def routers(model: Any) -> list[Any]:
    return [layer.mlp.router for layer in model.decoder.layers]


def replays(model: Any) -> list[Any]:
    return [router.router_replay for router in routers(model)]


def stacked(maps: dict[int, Any]) -> Any:
    """[rows, layers, experts]"""
    import torch

    return torch.stack([maps[layer] for layer in sorted(maps)], dim=1)


def as_map(ids: Any, experts: int) -> Any:
    """Expert ids [..., topk] as bool [..., experts]."""
    import torch

    return torch.zeros(*ids.shape[:-1], experts, dtype=torch.bool).scatter_(-1, ids, True)


def positions(tokens: Any) -> Any:
    import torch

    return torch.arange(tokens.shape[1]).expand_as(tokens)
