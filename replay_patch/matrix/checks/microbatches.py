"""The microbatches that the checks of sessions train on, and what their routers did with them."""

import collections
from collections.abc import Iterator
from typing import Any

from replay_patch.matrix import tiny
from replay_patch.matrix.checks import tools

LAYERS, MICROBATCHES = 2, 4
LENGTHS = (tools.SEQUENCE, tools.SEQUENCE - 3)  # tokens of the sequences of every microbatch


def layout_of(config: Any) -> Any:
    """Of the sequences of a microbatch, which are all alike, on this rank."""
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


def other_routes(layers: tuple[int, ...]) -> list[Any]:
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


def of_microbatch(routes: list[Any], microbatch: int) -> list[Any]:
    """Those of its sequences."""
    first = microbatch * len(LENGTHS)
    return routes[first : first + len(LENGTHS)]


def wanted_maps(routes: list[Any], microbatch: int, layer: int, layout: Any) -> Any:
    """bool [R, E]: of each router row of this rank; nothing for a row without a captured route."""
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
    """One schedule; (layer, microbatch) -> of each router call the map, and the native one.

    Whose a recompute is, is not asked of the product: its input is bitwise that of its forward.
    """
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
