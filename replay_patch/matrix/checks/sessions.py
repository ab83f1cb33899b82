"""What one rank checks of `recording()` and `replaying()`, in whatever parallel run it is."""

import collections
from collections.abc import Iterator
from typing import Any

import replay_patch
from replay_patch.matrix import tiny
from replay_patch.matrix.checks import tools

LAYERS, MICROBATCHES = 2, 4
LENGTHS = (tools.SEQUENCE, tools.SEQUENCE - 3)  # tokens of the sequences of every microbatch


def on_rank(rank: int, world: int, init_file: str | None, options: dict[str, Any]) -> None:
    """What the check `schedule` proves, on one rank; `options` are config fields."""
    options = {"num_layers": LAYERS} | options
    tiny.init(world, rank, init_file, **tools.group_sizes(options))
    config = tools.config(replay=False, **options)
    chunks = tiny.model_chunks(config)
    layout = layout_of(config)

    with replay_patch.recording(chunks) as record:
        native = run_watched(chunks, lambda chunk, _: record.load(chunk, layout), train=False)
    recorded = record.routes()
    assert [sequence.num_tokens for sequence in recorded] == [*LENGTHS] * MICROBATCHES
    without_router = getattr(config, "noop_layers", None) or ()  # MindSpeed's, numbered from 0
    layers = tuple(n for n in range(1, options["num_layers"] + 1) if n - 1 not in without_router)
    assert all(sequence.layers == layers for sequence in recorded), recorded[0].layers
    for (layer, microbatch), maps in native.items():
        wanted = wanted_maps(recorded, microbatch, layer, layout)
        rows = wanted.any(1)
        where = f"recorded, layer {layer}, microbatch {microbatch}"
        tools.same_map(wanted[rows], maps[0][0][rows], where)
        tools.same_map(maps[0][1], maps[0][0], where)

    routes = other_routes(layers)
    gradients = []
    for recompute in ({}, tools.FULL):
        tiny.clear_aux_tracker()
        config = tools.config(replay=False, **options, **recompute)
        chunks = tiny.model_chunks(config)
        with replay_patch.replaying(chunks) as replay:

            def load(chunk: Any, microbatch: int, replay: Any = replay) -> dict[str, Any]:
                return dict(replay.load(chunk, of_microbatch(routes, microbatch), layout))

            seen = run_watched(chunks, load, train=True)
        held = [router.layer_number for chunk in chunks for router in tools.routers(chunk)]
        expected = {(layer, m) for layer in held for m in range(MICROBATCHES)}
        assert seen.keys() == expected, f"rank {rank}: calls of {sorted(seen)}"
        _check_maps(seen, routes, layout, calls=2 if recompute else 1)
        _check_report(replay.report, seen, routes, layout)
        for chunk in chunks:
            reached = {n: p.grad for n, p in chunk.named_parameters() if p.grad is not None}
            assert any("router" in name for name in reached), "no gradient reaches a router"
            gradients.append(reached)
    half = len(gradients) // 2
    for without, with_recompute in zip(gradients[:half], gradients[half:], strict=True):
        tools.all_same_bits(without, with_recompute, f"rank {rank}, gradient of ")
    tiny.clear_aux_tracker()
    chunks = tiny.model_chunks(tools.config(**options))
    seen = run_watched(chunks, lambda chunk, m: _set_targets(chunk, routes, m, layout), train=True)
    _check_maps(seen, routes, layout, calls=1, own_holes=False)


def _set_targets(chunk: Any, routes: list[Any], microbatch: int, layout: Any) -> dict[str, Any]:
    """Give each router its ids [R, K] without a session; rows without a route get 0 .. K-1."""
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    for router in tools.routers(chunk):
        wanted = wanted_maps(routes, microbatch, router.layer_number, layout)
        wanted[~wanted.any(1), : tools.TOPK] = True
        replay = router.router_replay
        replay.clear_indices()
        replay.set_target_indices(wanted.nonzero()[:, 1].view(len(wanted), tools.TOPK))
        replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    return {}


def _check_maps(
    seen: Any, routes: list[Any], layout: Any, calls: int, own_holes: bool = True
) -> None:
    """Every call took the ids of its own microbatch, and a recompute what its forward took.
    With `own_holes`, tokens without a route took the native experts, and padding all alike."""
    for (layer, microbatch), maps in seen.items():
        where = f"layer {layer}, microbatch {microbatch}"
        assert len(maps) == calls, f"{where}: {len(maps)} router calls, expected {calls}"
        wanted = wanted_maps(routes, microbatch, layer, layout)
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


def _check_report(report: Any, seen: Any, routes: list[Any], layout: Any) -> None:
    """It counts each row once per layer, and has the overlap of each stage's first microbatch."""
    padding = int((layout.rows < 0).sum()) * len(seen)
    replayed = sum(int(wanted_maps(routes, m, layer, layout).any(1).sum()) for layer, m in seen)
    found = (report.replayed, report.holes, report.padding)
    expected = (replayed, len(layout.rows) * len(seen) - replayed - padding, padding)
    assert found == expected, f"(replayed, holes, padding) is {found}, expected {expected}"
    for (layer, microbatch), maps in seen.items():
        if microbatch == 0:
            wanted = wanted_maps(routes, 0, layer, layout)
            share = float((wanted & maps[0][1]).sum() / wanted.sum())
            shown = report.overlap[layer]
            assert abs(share - shown) < 1e-6, f"layer {layer}: overlap {shown}, expected {share}"


def layout_of(config: Any) -> Any:
    """The layout, on this rank, of any microbatch: all have the same lengths."""
    from megatron.core import parallel_state

    return replay_patch.TokenLayout.padded(
        LENGTHS,
        tools.SEQUENCE,
        tp_size=config.tensor_model_parallel_size,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        sequence_parallel=config.sequence_parallel,
        cp_size=config.context_parallel_size,
        cp_rank=parallel_state.get_context_parallel_rank(),
    )


def other_routes(layers: tuple[int, ...]) -> list[Any]:
    """Routes that no router would choose; the second and the last token of a sequence have none."""
    import torch

    out = []
    for number, length in enumerate([*LENGTHS] * MICROBATCHES):
        rows = length - 1
        ids = [tools.some_ids(seed=100 * number + layer, rows=rows) for layer in layers]
        captured = torch.ones(rows, dtype=torch.bool)
        captured[1] = False
        stacked = torch.stack(ids, dim=1)
        out.append(replay_patch.Routes(stacked, tools.EXPERTS, captured=captured, layers=layers))
    return out


def of_microbatch(routes: list[Any], microbatch: int) -> list[Any]:
    """The routes of a microbatch's sequences."""
    first = microbatch * len(LENGTHS)
    return routes[first : first + len(LENGTHS)]


def wanted_maps(routes: list[Any], microbatch: int, layer: int, layout: Any) -> Any:
    """The map bool [R, E] of this rank's router rows; a row without a captured route is False."""
    import torch

    wanted = torch.zeros(len(layout.rows), tools.EXPERTS, dtype=torch.bool)
    tokens: list[Any] = []
    for sequence, length in zip(of_microbatch(routes, microbatch), LENGTHS, strict=True):
        ids = sequence.expert_ids[:, sequence.layers.index(layer)].tolist()
        known = zip(ids, sequence.captured.tolist(), strict=True)
        tokens += [row if captured else None for row, captured in known]
        tokens += [None] * (length - sequence.num_tokens)
    for row, token in enumerate(layout.rows.tolist()):
        if token >= 0 and tokens[token] is not None:
            wanted[row, tokens[token]] = True
    return wanted


def run_watched(chunks: list[Any], load: Any, train: bool) -> dict[tuple[int, int], Any]:
    """Run a schedule; (layer, microbatch) -> (map, native map) of each of its router calls.
    A recompute's microbatch is known by its input, which is bitwise that of the forward."""
    import torch
    from megatron.core import parallel_state

    seen: dict[tuple[int, int], list[Any]] = collections.defaultdict(list)
    current: dict[Any, int] = {}
    first: dict[tuple[int, bytes], int] = {}  # layer, input -> microbatch of the first forward
    hooks = []
    for chunk in chunks:
        for router in tools.routers(chunk):

            def watch(router: Any, inputs: Any, output: Any, chunk: Any = chunk) -> None:
                layer, hidden = router.layer_number, inputs[0].detach()
                logits = torch.nn.functional.linear(hidden, router.weight.detach()).flatten(0, 1)
                native = tools.as_map(tools.native_topk(logits, tools.TOPK)[1])
                microbatch = first.setdefault((layer, hidden.numpy().tobytes()), current[chunk])
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
        tokens, positions = _of_context_rank(tokens), _of_context_rank(positions)
        return chunk(tokens, positions, None, labels=tokens, **arguments), tools.mean_loss

    tools.run_schedule(forward_step, chunks, MICROBATCHES, forward_only=not train)
    for hook in hooks:
        hook.remove()
    return seen


def _of_context_rank(values: Any) -> Any:
    """The columns [B, S / cp] of this context-parallel rank, in Megatron's zigzag order."""
    from megatron.core import parallel_state

    from replay_patch.matrix.attention import cp_positions

    size = parallel_state.get_context_parallel_world_size()
    rank = parallel_state.get_context_parallel_rank()
    return values[:, cp_positions([values.shape[1]], size, rank)[1]]
