"""One training step of a tiny GPT, in one process or spread over ranks, so that both compare.

The functions run in a rank that `replay_patch.matrix.ranks.launch` has started.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from replay_patch.matrix import tiny

LAYERS = 4  # one for each chunk of two pipeline stages with two virtual ones
MICROBATCHES = 4  # p2p receives that are matched the wrong way round show from the third on
WIDTH, LENGTH = 2, 8  # sequences and tokens of a microbatch


@dataclass(frozen=True)
class Layout:
    """How a model is spread over ranks. Tensor parallelism comes with sequence parallelism."""

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    cp: int = 1

    @property
    def world(self) -> int:
        return self.pp * max(self.tp * self.cp, self.ep)

    @property
    def sizes(self) -> dict[str, int | None]:
        """Named alike by configs and by `initialize_model_parallel`."""
        return {
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "virtual_pipeline_model_parallel_size": self.vpp,
            "expert_model_parallel_size": self.ep,
            "context_parallel_size": self.cp,
        }


ONE_PROCESS = Layout()


@dataclass(frozen=True)
class Step:
    """What a training step gave on one rank."""

    replica: int  # the data-parallel rank, which decides the data
    losses: list[float]  # by microbatch; empty but on the last pipeline stage
    router_gradients: dict[str, Tensor]  # by `global_name`
    router_calls: int  # forwards, those of a recompute included


def start(
    layout: Layout,
    rank: int,
    init_file: str,
    config_class: Any = None,
    torch_attention: bool | None = None,
    **options: Any,
) -> list[Any]:
    """Join the process groups and build this rank's model chunks.

    Args:
        layout: of all ranks.
        rank: of this process.
        init_file: handed over by `launch`.
        config_class, torch_attention, options: of `build`.
    """
    tiny.init(layout.world, rank, init_file, **layout.sizes)
    return build(layout, config_class, torch_attention, **options)


def build(
    layout: Layout,
    config_class: Any = None,
    torch_attention: bool | None = None,
    unchecked: dict[str, Any] | None = None,
    **options: Any,
) -> list[Any]:
    """This rank's model chunks.

    Args:
        layout: of all ranks, which have their process groups.
        config_class: of `tiny.moe_config`.
        torch_attention: of `tiny.gpt_model`.
        unchecked: fields that the config's checks would refuse.
        options: of the config.
    """
    config = tiny.moe_config(
        config_class,
        **layout.sizes,
        **(tiny.VPP_P2P if layout.vpp else {}),
        **{
            "num_layers": LAYERS,
            "sequence_parallel": layout.tp > 1,
            "enable_routing_replay": True,  # replay objects that are not told to do anything
            # An auxiliary loss is a mean over all tokens of a replica: no sum of its parts.
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
        }
        | options,
    )
    for name, value in (unchecked or {}).items():
        setattr(config, name, value)
    return tiny.model_chunks(config, torch_attention=torch_attention)


def train_step(chunks: list[Any], replica: int | None = None) -> Step:
    """Forward and backward of `MICROBATCHES` microbatches; gradients are left in the model.

    Args:
        chunks: with gradients of None.
        replica: whose data; this rank's own if None.
    """
    if replica is None:
        replica = parallel_state.get_data_parallel_rank()
    calls: list[str] = []
    hooks = [
        router.register_forward_hook(lambda *_, name=name: calls.append(name))
        for name, router in _routers(chunks).items()
    ]

    losses = run_schedule(chunks, microbatches(replica))

    for hook in hooks:
        hook.remove()
    return Step(replica, losses, router_gradients(chunks), len(calls))


def microbatches(replica: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(tokens, positions, labels), each [WIDTH, LENGTH], different for each replica."""
    generator = torch.Generator().manual_seed(replica)
    draw = (2, WIDTH, LENGTH)
    return [
        (tokens, torch.arange(LENGTH).expand_as(tokens), labels)
        for tokens, labels in (
            torch.randint(0, tiny.VOCAB_SIZE, draw, generator=generator)
            for _ in range(MICROBATCHES)
        )
    ]


def run_schedule(chunks: list[Any], batches: Sequence[Any], **options: Any) -> list[float]:
    """Megatron's own schedule for these chunks; the losses, [] but on the last pipeline stage."""
    iterators = [iter(batches) for _ in chunks]
    several = len(chunks) > 1
    arguments = {
        "forward_step_func": forward_step,
        "data_iterator": iterators if several else iterators[0],
        "model": chunks if several else chunks[0],
        "num_microbatches": len(batches),
        "seq_length": LENGTH,
        "micro_batch_size": WIDTH,
        "forward_only": False,
    }
    outputs = get_forward_backward_func()(**arguments | options)
    return [float(output["loss"]) for output in outputs]


def forward_step(batches: Iterator[Any], chunk: Any) -> tuple[Any, Any]:
    """The `forward_step_func` of a plain language model."""
    tokens, positions, labels = next(batches)

    def mean(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = losses.float().mean()
        return loss, {"loss": loss.detach()}

    return chunk(tokens, positions, None, labels=labels), mean


def router_gradients(chunks: list[Any]) -> dict[str, Tensor]:
    """The gradients of the router weights on this rank's stage, by `global_name`.

    Under sequence parallelism each rank has the part of its tokens; the sum is returned.
    """
    gradients = {}
    for name, router in _routers(chunks).items():
        gradient = router.weight.grad.clone()
        if getattr(router.weight, "sequence_parallel", False):
            dist.all_reduce(gradient, group=parallel_state.get_tensor_model_parallel_group())
        gradients[name] = gradient
    return gradients


def weights(model: Any) -> dict[str, Tensor]:
    """The weights of a one-process model, for `load_weights`."""
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def load_weights(chunks: list[Any], whole: dict[str, Tensor]) -> None:
    """Give this rank its part of a one-process model. (No gated layers: those are cut in two.)"""
    with torch.no_grad():
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                weight = whole[global_name(chunk, name)]
                if weight.shape != parameter.shape:
                    weight = _tensor_parallel_part(name, parameter, weight)
                parameter.copy_(weight)


def global_name(chunk: Any, name: str) -> str:
    """The name of a module or parameter in a model with all layers and all experts."""

    def layer(match: re.Match[str]) -> str:
        return f"decoder.layers.{chunk.decoder.layers[int(match[1])].layer_number - 1}."

    def expert(match: re.Match[str]) -> str:
        experts = chunk.config.num_moe_experts // chunk.config.expert_model_parallel_size
        first = parallel_state.get_expert_model_parallel_rank() * experts
        return f"local_experts.{first + int(match[1])}."

    name = re.sub(r"^decoder\.layers\.(\d+)\.", layer, name)
    return re.sub(r"local_experts\.(\d+)\.", expert, name)


def _tensor_parallel_part(name: str, parameter: Any, weight: Tensor) -> Tensor:
    if "local_experts" in name:
        size = parallel_state.get_expert_tensor_parallel_world_size()
        rank = parallel_state.get_expert_tensor_parallel_rank()
    else:
        size = parallel_state.get_tensor_model_parallel_world_size()
        rank = parallel_state.get_tensor_model_parallel_rank()
    return weight.chunk(size, parameter.partition_dim)[rank]


def _routers(chunks: list[Any]) -> dict[str, Any]:
    return {
        global_name(chunk, name): module
        for chunk in chunks
        for name, module in chunk.named_modules()
        if isinstance(module, TopKRouter)
    }
