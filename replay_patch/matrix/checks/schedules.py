"""Checks of `recording()` and `replaying()`: whole schedules, padding, holes and full recompute."""

import replay_patch
from replay_patch.matrix import tiny
from replay_patch.matrix.checks import sessions, tools
from replay_patch.matrix.registry import check


@check("local-layers")
def local_layers() -> None:
    """`local_layers()` gives the MoE layers of any stage, without process groups: those of an even
    or uneven model, with dense layers first or between; each once over all stages."""
    first, last = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
    for layers, pp, vpp, options, counts in (
        (8, 4, None, {}, [2, 2, 2, 2]),
        (8, 2, 2, {}, [2, 2, 2, 2]),
        (10, 3, None, {first: 2, last: 2}, [2, 6, 2]),
        (14, 3, 2, {last: 2}, [3, 3, 1, 3, 3, 1]),
    ):
        for frequency in (1, 2, [0, 0] + [1] * (layers - 2)):
            is_moe = (
                [number % frequency == 0 for number in range(layers)]
                if isinstance(frequency, int)
                else frequency
            )
            config = tools.staged_config(layers, pp, vpp, moe_layer_freq=frequency, **options)
            begin = 0
            for stage, count in enumerate(counts):
                where = {"pp_rank": stage % pp, "vp_stage": None if vpp is None else stage // pp}
                expected = tuple(n + 1 for n in range(begin, begin + count) if is_moe[n])
                found = replay_patch.local_layers(config, **where)
                assert found == expected, (
                    f"{layers} layers, pp={pp}, vpp={vpp}, moe_layer_freq={frequency}, {options}: "
                    f"{where} holds {found}, expected {expected}"
                )
                begin += count


@check("schedule", replays=True)
def schedule() -> None:
    """`recording()` gives the routes of every sequence in every MoE layer. Under `replaying()` each
    router call, also of a full recompute, takes the experts given for its microbatch; tokens
    without a route take the native ones again in the recompute, padding different ones. Gradients
    are bitwise those without recompute. Targets set one by one, as code for Megatron's own
    `RouterReplay` does, are taken, too."""
    sessions.on_rank(0, 1, None, {})


@check("tp-sp", replays=True, ranks=2)
def tp_sp() -> None:
    """The same on two tensor-parallel ranks with sequence parallelism."""
    tools.on_ranks(sessions.on_rank, tensor_model_parallel_size=2, sequence_parallel=True)


@check("cp", replays=True, ranks=2)
def cp() -> None:
    """The same on two context-parallel ranks, zigzag."""
    with tools.mindspeed_may_fail("Unsupported CP capability"):
        tools.on_ranks(sessions.on_rank, context_parallel_size=2)


@check("pp", replays=True, ranks=2)
def pp() -> None:
    """The same on two pipeline stages, 1F1B."""
    tools.on_ranks(sessions.on_rank, pipeline_model_parallel_size=2)


@check("vpp", replays=True, ranks=2)
def vpp() -> None:
    """The same on two pipeline stages of two virtual stages, interleaved."""
    sizes = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    tools.on_ranks(sessions.on_rank, num_layers=4, **sizes, **tiny.VPP_P2P)


@check("ep", replays=True, ranks=2)
def ep() -> None:
    """The same on two expert-parallel ranks with data of their own, with both dispatchers."""
    for dispatcher in ("alltoall", "allgather"):
        tools.on_ranks(
            sessions.on_rank, expert_model_parallel_size=2, moe_token_dispatcher_type=dispatcher
        )
