"""Checks of `recording()` and `replaying()`: whole schedules, padding, holes and full recompute."""

import collections
from collections.abc import Iterator
from typing import Any

from replay_patch.matrix.checks import tools
from replay_patch.matrix.registry import check

LAYERS, MICROBATCHES = 2, 4
LENGTHS = (tools.SEQUENCE, tools.SEQUENCE - 3)  # tokens of the sequences of every microbatch


@check("local-layers")
def local_layers() -> None:
    """`local_layers()` gives the MoE layers of any stage, without process groups: those of an even
    or uneven model, with dense layers first or between; each once over all stages."""
    import replay_patch
    from replay_patch.matrix import tiny

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
            config = tiny.moe_config(
                num_layers=layers,
                moe_layer_freq=frequency,
                pipeline_model_parallel_size=pp,
                virtual_pipeline_model_parallel_size=vpp,
                **(tiny.VPP_P2P if vpp else {}),
                **options,
            )
            begin = 0
            for place, count in enumerate(counts):
                where = {"pp_rank": place % pp, "vp_stage": None if vpp is None else place // pp}
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
    _rank(0, 1, None, {})


@check("tp-sp", replays=True, ranks=2)
def tp_sp() -> None:
    """The same on two tensor-parallel ranks with sequence parallelism."""
    tools.on_ranks(_rank, tensor_model_parallel_size=2, sequence_parallel=True)


@check("cp", replays=True, ranks=2)
def cp() -> None:
    """The same on two context-parallel ranks, zigzag."""
    with tools.mindspeed_may_fail("Unsupported CP capability"):
        tools.on_ranks(_rank, context_parallel_size=2)


@check("pp", replays=True, ranks=2)
def pp() -> None:
    """The same on two pipeline stages, 1F1B."""
    tools.on_ranks(_rank, pipeline_model_parallel_size=2)


@check("vpp", replays=True, ranks=2)
def vpp() -> None:
    """The same on two pipeline stages of two virtual stages, interleaved."""
    from replay_patch.matrix import tiny

    sizes = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    tools.on_ranks(_rank, num_layers=4, **sizes, **tiny.VPP_P2P)


@check("ep", replays=True, ranks=2)
def ep() -> None:
    """The same on two expert-parallel ranks with data of their own, with both dispatchers."""
    for dispatcher in ("alltoall", "allgather"):
        tools.on_ranks(_rank, expert_model_parallel_size=2, moe_token_dispatcher_type=dispatcher)


def _rank(rank: int, world: int, init_file: str | None, options: dict[str, Any]) -> None:
    import replay_patch
    from replay_patch.matrix import tiny

    options = {"num_layers": LAYERS} | options
    tiny.init(world, rank, init_file, **tools.group_sizes(options))
    config = tools.config(replay=False, **options)
    chunks = tiny.model_chunks(config)
    layout = _layout(config)

    with replay_patch.recording(chunks) as record:
        native = _run(chunks, lambda chunk, _: record.load(chunk, layout), train=False)
    recorded = record.routes()
    assert [routes.num_tokens for routes in recorded] == [*LENGTHS] * MICROBATCHES
    absent = getattr(config, "noop_layers", None) or ()  # MindSpeed's, numbered from 0
    layers = tuple(n for n in range(1, options["num_layers"] + 1) if n - 1 not in absent)
    assert all(routes.layers == layers for routes in recorded), recorded[0].layers
    for (layer, microbatch), maps in native.items():
        wanted = _maps(recorded, microbatch, layer, layout)
        rows = wanted.any(1)
        where = f"recorded, layer {layer}, microbatch {microbatch}"
        tools.same_map(wanted[rows], maps[0][0][rows], where)
        tools.same_map(maps[0][1], maps[0][0], where)

    given = _other_routes(layers)
    gradients = []
    full = {"recompute_granularity": "full", "recompute_method": "uniform"}
    for recompute in ({}, full | {"recompute_num_layers": 1}):
        tiny.clear_aux_tracker()
        config = tools.config(replay=False, **options, **recompute)
        chunks = tiny.model_chunks(config)
        with replay_patch.replaying(chunks) as replay:

            def load(chunk: Any, microbatch: int, replay: Any = replay) -> dict[str, Any]:
                return dict(replay.load(chunk, _of(given, microbatch), layout))

            seen = _run(chunks, load, train=True)
        held = [router.layer_number for chunk in chunks for router in tools.routers(chunk)]
        expected = {(layer, m) for layer in held for m in range(MICROBATCHES)}
        assert seen.keys() == expected, f"rank {rank}: calls of {sorted(seen)}"
        _check_maps(seen, given, layout, calls=2 if recompute else 1)
        _check_report(replay.report, seen, given, layout)
        for chunk in chunks:
            found = {n: p.grad for n, p in chunk.named_parameters() if p.grad is not None}
            assert any("router" in name for name in found), "no gradient reaches a router"
            gradients.append(found)
    half = len(gradients) // 2
    for without, with_recompute in zip(gradients[:half], gradients[half:], strict=True):
        for name, gradient in without.items():
            tools.same_bits(gradient, with_recompute[name], f"rank {rank}, gradient of {name}")
    tiny.clear_aux_tracker()
    chunks = tiny.model_chunks(tools.config(**options))
    seen = _run(chunks, lambda chunk, m: _set_targets(chunk, given, m, layout), train=True)
    _check_maps(seen, given, layout, calls=1, own_holes=False)


def _set_targets(chunk: Any, given: list[Any], microbatch: int, layout: Any) -> dict[str, Any]:
    """The low-level way: ids [R, K] for each router; rows without any get experts 0 .. K-1."""
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    for router in tools.routers(chunk):
        wanted = _maps(given, microbatch, router.layer_number, layout)
        wanted[~wanted.any(1), : tools.TOPK] = True
        replay = router.router_replay
        replay.clear_indices()
        replay.set_target_indices(wanted.nonzero()[:, 1].view(len(wanted), tools.TOPK))
        replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    return {}


def _layout(config: Any) -> Any:
    from megatron.core import parallel_state

    from replay_patch import TokenLayout

    return TokenLayout.padded(
        LENGTHS,
        tools.SEQUENCE,
        tp_size=config.tensor_model_parallel_size,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        sequence_parallel=config.sequence_parallel,
        cp_size=config.context_parallel_size,
        cp_rank=parallel_state.get_context_parallel_rank(),
    )


def _other_routes(layers: tuple[int, ...]) -> list[Any]:
    """Routes that no router would choose, but for a last token without one and one hole more."""
    import torch

    from replay_patch import Routes

    out = []
    for number, length in enumerate([*LENGTHS] * MICROBATCHES):
        rows = length - 1
        ids = [tools.some_ids(seed=100 * number + layer, rows=rows) for layer in layers]
        captured = torch.ones(rows, dtype=torch.bool)
        captured[1] = False
        stacked = torch.stack(ids, dim=1)
        out.append(Routes(stacked, tools.EXPERTS, captured=captured, layers=layers))
    return out


def _of(routes: list[Any], microbatch: int) -> list[Any]:
    first = microbatch * len(LENGTHS)
    return routes[first : first + len(LENGTHS)]


def _maps(routes: list[Any], microbatch: int, layer: int, layout: Any) -> Any:
    """bool [R, E]: of each router row of this rank; nothing for a row without a captured route."""
    import torch

    wanted = torch.zeros(len(layout.rows), tools.EXPERTS, dtype=torch.bool)
    tokens: list[Any] = []
    for one, length in zip(_of(routes, microbatch), LENGTHS, strict=True):
        ids = one.expert_ids[:, one.layers.index(layer)].tolist()
        known = zip(ids, one.captured.tolist(), strict=True)
        tokens += [row if captured else None for row, captured in known]
        tokens += [None] * (length - one.num_tokens)
    for row, token in enumerate(layout.rows.tolist()):
        if token >= 0 and tokens[token] is not None:
            wanted[row, tokens[token]] = True
    return wanted


def _check_maps(
    seen: Any, given: list[Any], layout: Any, calls: int, own_holes: bool = True
) -> None:
    """Every call took the ids of its own microbatch, and a recompute what its forward took.

    Args:
        own_holes: tokens without a route took the native experts, and padding all alike.
    """
    for (layer, microbatch), maps in seen.items():
        where = f"layer {layer}, microbatch {microbatch}"
        assert len(maps) == calls, f"{where}: {len(maps)} router calls, expected {calls}"
        wanted = _maps(given, microbatch, layer, layout)
        rows = wanted.any(1)
        padding = layout.rows < 0
        holes = ~(rows | padding)
        for number, (found, native) in enumerate(maps, start=1):
            call = f"{where}, call {number}"
            tools.same_map(wanted[rows], found[rows], call)
            tools.same_map(maps[0][0], found, f"{call} against the first")
            assert (found.sum(1) == tools.TOPK).all(), f"{call}: a row without distinct experts"
            if own_holes:
                tools.same_map(native[holes], found[holes], f"{call}: tokens without a route")
                used = found[padding].sum(0)
                spread = int(used.max() - used.min())
                assert spread <= 1, f"{call}: padding goes to experts {used.tolist()} times"


def _check_report(report: Any, seen: Any, given: list[Any], layout: Any) -> None:
    """It counts each row once for each layer, and the first microbatch of each stage's overlap."""
    padding = int((layout.rows < 0).sum()) * len(seen)
    replayed = sum(int(_maps(given, m, layer, layout).any(1).sum()) for layer, m in seen)
    found = (report.replayed, report.holes, report.padding)
    expected = (replayed, len(layout.rows) * len(seen) - replayed - padding, padding)
    assert found == expected, f"(replayed, holes, padding) is {found}, expected {expected}"
    for (layer, microbatch), maps in seen.items():
        if microbatch == 0:
            wanted = _maps(given, 0, layer, layout)
            share = float((wanted & maps[0][1]).sum() / wanted.sum())
            shown = report.overlap[layer]
            assert abs(share - shown) < 1e-6, f"layer {layer}: overlap {shown}, expected {share}"


def _run(chunks: list[Any], load: Any, train: bool) -> dict[tuple[int, int], Any]:
    """One schedule; (layer, microbatch) -> of each router call the map, and the native one.

    Whose a recompute is, is not asked of the product: its input is bitwise that of its forward.
    """
    import torch
    from megatron.core import parallel_state

    from replay_patch.matrix import tiny

    seen: dict[tuple[int, int], list[Any]] = collections.defaultdict(list)
    current: dict[Any, int] = {}
    inputs: dict[tuple[int, bytes], int] = {}  # layer, input -> microbatch of the first forward
    hooks = []
    for chunk in chunks:
        for router in tools.routers(chunk):

            def watch(router: Any, given: Any, output: Any, chunk: Any = chunk) -> None:
                layer, hidden = router.layer_number, given[0].detach()
                logits = torch.nn.functional.linear(hidden, router.weight.detach()).flatten(0, 1)
                native = tools.as_map(tools.native_topk(logits, tools.TOPK)[1])
                microbatch = inputs.setdefault((layer, hidden.numpy().tobytes()), current[chunk])
                seen[layer, microbatch].append((output[1].clone(), native))

            hooks.append(router.register_forward_hook(watch))

    def forward_step(batches: Iterator[int], chunk: Any) -> tuple[Any, Any]:
        current[chunk] = microbatch = next(batches)
        arguments = load(chunk, microbatch)
        seed = 10 * parallel_state.get_data_parallel_rank() + microbatch
        generator = torch.Generator().manual_seed(seed)
        shape = (len(LENGTHS), tools.SEQUENCE)
        tokens = torch.randint(0, tiny.VOCAB_SIZE, shape, generator=generator)
        positions = torch.arange(tools.SEQUENCE).expand(shape)
        tokens, positions = _of_rank(tokens), _of_rank(positions)
        return chunk(tokens, positions, None, labels=tokens, **arguments), tools.mean_loss

    tools.run_schedule(forward_step, chunks, MICROBATCHES, forward_only=not train)
    for hook in hooks:
        hook.remove()
    return seen


def _of_rank(values: Any) -> Any:
    """The columns [B, S / cp] of this context-parallel rank, in Megatron's zigzag order."""
    from megatron.core import parallel_state

    from replay_patch.matrix.attention import cp_positions

    size = parallel_state.get_context_parallel_world_size()
    rank = parallel_state.get_context_parallel_rank()
    return values[:, cp_positions([values.shape[1]], size, rank)[1]]
