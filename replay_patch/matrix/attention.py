"""A core attention in plain torch, for what Megatron's own cannot do without Transformer Engine.

Megatron's `DotProductAttention` refuses packed sequences (THD) and context parallelism, and has
no separate value width (MLA). `with_torch_attention` puts `TorchAttention` in its place in a
layer spec. It is O(n^2) in memory and meant for sequences of a few dozen tokens.
"""

import copy
import math
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["TorchAttention", "cp_positions", "with_torch_attention"]


def with_torch_attention(spec: Any) -> Any:
    """A copy of a layer spec (of the local backend) that uses `TorchAttention`."""
    spec = copy.deepcopy(spec)
    spec.submodules.self_attention.submodules.core_attention = TorchAttention
    return spec


def cp_positions(lengths: list[int], cp_size: int, cp_rank: int) -> tuple[Any, Any]:
    """The tokens of a context-parallel rank in Megatron's zigzag order, as (index of the sequence,
    position in it), both int64 [tokens of this rank]. With several ranks, the length of each
    (packed) sequence must be a multiple of `2 * cp_size`, else ValueError."""
    sequences: list[int] = []
    positions: list[int] = []
    for index, length in enumerate(lengths):
        held = list(range(length))
        if cp_size > 1:
            part, rest = divmod(length, 2 * cp_size)
            if rest:
                raise ValueError(
                    f"cp_positions: sequence {index} has {length} tokens, "
                    f"expected a multiple of 2 * cp_size = {2 * cp_size}"
                )
            mirror = 2 * cp_size - 1 - cp_rank
            held = [*range(cp_rank * part, (cp_rank + 1) * part)]
            held += range(mirror * part, (mirror + 1) * part)
        sequences += [index] * len(held)
        positions += held
    return torch.tensor(sequences), torch.tensor(positions)


class TorchAttention(torch.nn.Module):
    """Causal attention over [s, b, heads, width], or over [t, heads, width] when packed."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any = None,
        attention_type: Any = None,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **unused: Any,  # differs by release: cp_comm_type, process groups, k_channels, ...
    ) -> None:
        super().__init__()
        self.config = config
        self.layer_number = layer_number
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any = None,
        attn_mask_type: Any = None,
        attention_bias: Any = None,
        packed_seq_params: Any = None,
        **unused: Any,
    ) -> Any:
        packed = packed_seq_params is not None and packed_seq_params.qkv_format == "thd"
        if packed:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))

        cp_size = self.config.context_parallel_size
        lengths = _lengths(packed_seq_params) if packed else [query.shape[0] * cp_size]
        if cp_size > 1:
            from megatron.core import parallel_state

            group = parallel_state.get_context_parallel_group()
            cp_rank = parallel_state.get_context_parallel_rank()
            key, value = _gather(key, group), _gather(value, group)
            shares = [cp_positions(lengths, cp_size, rank) for rank in range(cp_size)]
            q_seq, q_pos = shares[cp_rank]
            k_seq, k_pos = (torch.cat(part) for part in zip(*shares, strict=True))
        else:
            q_seq, q_pos = k_seq, k_pos = cp_positions(lengths, 1, 0)
        visible = (q_seq[:, None] == k_seq[None]) & (q_pos[:, None] >= k_pos[None])

        repeat = query.shape[2] // key.shape[2]  # grouped-query attention
        q = query.permute(1, 2, 0, 3)  # [b, heads, s, width]
        k = key.repeat_interleave(repeat, dim=2).permute(1, 2, 0, 3)
        v = value.repeat_interleave(repeat, dim=2).permute(1, 2, 0, 3)
        scale = 1 / math.sqrt(q.shape[-1]) if self.softmax_scale is None else self.softmax_scale
        weights = (q @ k.transpose(-1, -2)).float() * scale
        weights = weights.masked_fill(~visible, float("-inf")).softmax(-1).to(v.dtype)
        out = (weights @ v).permute(2, 0, 1, 3)
        out = out.reshape(out.shape[0], out.shape[1], -1)
        return out.squeeze(1) if packed else out


def _lengths(packed_seq_params: Any) -> list[int]:
    ends = packed_seq_params.cu_seqlens_q_padded
    if ends is None:
        ends = packed_seq_params.cu_seqlens_q
    lengths: list[int] = (ends[1:] - ends[:-1]).tolist()
    return lengths


def _gather(x: Any, group: Any) -> Any:
    return _Gather.apply(x, group)  # type: ignore[no-untyped-call]


class _Gather(torch.autograd.Function):
    """All-gather along dimension 0; the backward sums over the ranks and keeps its own part."""

    @staticmethod
    def forward(ctx: Any, x: Any, group: Any) -> Any:
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        parts = grad.chunk(dist.get_world_size(ctx.group))
        return parts[dist.get_rank(ctx.group)], None
