"""Checks on several gloo ranks: whole training steps by Megatron's own schedules."""

from collections.abc import Iterator
from typing import Any

from replay_patch.matrix.checks import tools
from replay_patch.matrix.registry import REPLAY, check

LAYERS, MICROBATCHES = 4, 4


@check("tp-sp", patches=REPLAY, ranks=2)
def tp_sp() -> None:
    """Two tensor-parallel ranks with sequence parallelism: each row of each rank's routers, in
    every microbatch, goes to the experts given for its token."""
    _on_ranks(tensor_model_parallel_size=2, sequence_parallel=True)


@check("pp", patches=REPLAY, ranks=2)
def pp() -> None:
    """Two pipeline stages, 1F1B: the same."""
    _on_ranks(pipeline_model_parallel_size=2)


@check("vpp", patches=REPLAY, ranks=2)
def vpp() -> None:
    """Two pipeline stages of two virtual stages, interleaved: the same."""
    from replay_patch.matrix import tiny

    sizes = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    _on_ranks(**sizes, **tiny.VPP_P2P)


@check("ep", patches=REPLAY, ranks=2)
def ep() -> None:
    """Two expert-parallel ranks with data of their own, with both dispatchers: the same."""
    for dispatcher in ("alltoall", "allgather"):
        _on_ranks(expert_model_parallel_size=2, moe_token_dispatcher_type=dispatcher)


def _on_ranks(**options: Any) -> None:
    from replay_patch.matrix.ranks import launch

    launch(_rank, 2, (options,))


def _rank(rank: int, world: int, init_file: str, options: dict[str, Any]) -> None:
    import torch
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    from replay_patch.matrix import tiny

    groups = {k: v for k, v in options.items() if k.endswith("parallel_size")}
    tiny.init(world, rank, init_file, **groups)
    config = tools.config(num_layers=LAYERS, **options)
    chunks = tiny.model_chunks(config)
    replica = parallel_state.get_data_parallel_rank()
    seen: list[tuple[int, int]] = []  # (layer, microbatch) of each router call

    def wanted(layer: int, microbatch: int) -> Any:
        """The ids of this rank's rows: all tokens in sequence-major order, cut for SP."""
        ids = tools.some_ids(seed=1000 * replica + 100 * microbatch + layer)
        parts = config.tensor_model_parallel_size if config.sequence_parallel else 1
        return ids.chunk(parts)[parallel_state.get_tensor_model_parallel_rank() % parts]

    def watch(router: Any, microbatch: int, output: Any) -> None:
        layer = router.router_replay.layer_number
        seen.append((layer, microbatch))
        where = f"rank {rank}, layer {layer}, microbatch {microbatch}"
        tools.same_map(tools.as_map(wanted(layer, microbatch)), output[1], where)

    def forward_step(batches: Iterator[int], chunk: Any) -> tuple[Any, Any]:
        microbatch = next(batches)
        hooks = []
        for router in (m for m in chunk.modules() if isinstance(m, TopKRouter)):
            replay = router.router_replay
            replay.clear_indices()
            replay.set_target_indices(wanted(replay.layer_number, microbatch))
            replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
            hooks.append(
                router.register_forward_hook(lambda r, _, out, m=microbatch: watch(r, m, out))
            )
        generator = torch.Generator().manual_seed(10 * replica + microbatch)
        shape = (tools.BATCH, tools.SEQUENCE)
        tokens = torch.randint(0, tiny.VOCAB_SIZE, shape, generator=generator)
        positions = torch.arange(tools.SEQUENCE).expand(shape)
        output = chunk(tokens, positions, None, labels=tokens)
        for hook in hooks:
            hook.remove()
        return output, tools.mean_loss

    several = len(chunks) > 1
    iterators = [iter(range(MICROBATCHES)) for _ in chunks]
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if several else iterators[0],
        model=chunks if several else chunks[0],
        num_microbatches=MICROBATCHES,
        seq_length=tools.SEQUENCE,
        micro_batch_size=tools.BATCH,
        forward_only=False,
    )
    layers = [layer.layer_number for chunk in chunks for layer in chunk.decoder.layers]
    expected = [(layer, m) for layer in layers for m in range(MICROBATCHES)]
    assert sorted(seen) == sorted(expected), f"rank {rank}: router calls {sorted(seen)}"
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if "router" in name:
                where = f"rank {rank}: the gradient of {name}"
                assert parameter.grad is not None, f"{where} is missing"
                assert parameter.grad.isfinite().all(), f"{where} is {parameter.grad}"
                assert parameter.grad.any(), f"{where} is zero"
