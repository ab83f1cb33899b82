"""The model of the demo: a tiny mixture-of-experts GPT of a real Megatron-core."""

from dataclasses import dataclass
from typing import Any

from replay_patch.matrix import tiny


@dataclass(frozen=True)
class Sizes:
    """Small enough for a minute on two slow cores. `init_std` makes random weights as touchy as
    trained ones: with it about one router decision in ten differs between bf16 and fp32, as in the
    models of the R3 paper."""

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


def watch_routing_maps(model: Any) -> dict[int, Any]:
    """Each layer's routing map, bool [rows, experts]: always that of its last forward."""
    maps: dict[int, Any] = {}
    for layer, router in enumerate(_routers(model)):

        def keep(module: Any, inputs: Any, outputs: Any, layer: int = layer) -> None:
            maps[layer] = outputs[1].detach().bool()

        router.register_forward_hook(keep)
    return maps


def replay_objects(model: Any) -> list[Any]:
    """Megatron's `RouterReplay` of each layer."""
    return [router.router_replay for router in _routers(model)]


def stacked(maps: dict[int, Any]) -> Any:
    """The maps of all layers as one tensor, [rows, layers, experts]."""
    import torch

    return torch.stack([maps[layer] for layer in sorted(maps)], dim=1)


def as_map(ids: Any, experts: int) -> Any:
    """Expert ids [..., topk] as bool [..., experts]."""
    import torch

    return torch.zeros(*ids.shape[:-1], experts, dtype=torch.bool).scatter_(-1, ids, True)


def positions(tokens: Any) -> Any:
    """Position ids like `tokens`, [B, S]."""
    import torch

    return torch.arange(tokens.shape[1]).expand_as(tokens)


def _routers(model: Any) -> list[Any]:
    return [layer.mlp.router for layer in model.decoder.layers]
