"""Attention over [S, B, heads, channels], or over packed sequences [T, heads, channels]."""

from typing import Any

import torch
from torch.nn import functional

from transformer_engine.pytorch.arguments import refuse


class DotProductAttention(torch.nn.Module):
    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: Any,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        attn_mask_type: str = "causal",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        sequence_parallel: bool = False,
        window_size: Any = None,
        cp_comm_type: Any = None,
        **rest: Any,
    ) -> None:
        super().__init__()
        windowed = window_size not in (None, (-1, -1), (-1, 0))
        softmax = None if softmax_type == "vanilla" else softmax_type
        other = {"window_size": window_size if windowed else None, "softmax_type": softmax}
        refuse(
            "DotProductAttention", {**rest, **other, "attention_dropout": attention_dropout or 0}
        )
        self.mask_type, self.scale = attn_mask_type, softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        attn_mask_type: str | None = None,
        qkv_format: str = "sbhd",
        cu_seqlens_q: torch.Tensor | None = None,
        **rest: Any,
    ) -> torch.Tensor:
        kind = attn_mask_type or self.mask_type
        if qkv_format == "thd":
            # Padding behind each sequence is only ever attended by itself.
            ends = rest.get("cu_seqlens_q_padded")
            ends = cu_seqlens_q if ends is None else ends
            assert ends is not None
            lengths = ends.diff().tolist()
            parts = zip(*(each.split(lengths) for each in (query, key, value)), strict=True)
            return torch.cat([self._attend(*(p[:, None] for p in part), True, None)[:, 0]
                              for part in parts])  # fmt: skip
        if qkv_format != "sbhd":
            raise NotImplementedError(f"the Transformer Engine stand-in: qkv_format={qkv_format!r}")
        if "padding" not in kind and kind != "arbitrary":
            attention_mask = None
        return self._attend(query, key, value, "causal" in kind, attention_mask)

    def _attend(self, query: Any, key: Any, value: Any, causal: bool, mask: Any) -> torch.Tensor:
        """True in the mask is what is not attended; the result is [S, B, heads * channels]."""
        heads_first = [each.permute(1, 2, 0, 3) for each in (query, key, value)]
        allowed = None
        if mask is not None:
            shape = (query.shape[0], key.shape[0])
            allowed = ~mask & (torch.ones(shape).tril().bool() if causal else True)
        out = functional.scaled_dot_product_attention(
            *heads_first,
            attn_mask=allowed,
            is_causal=causal and allowed is None,
            scale=self.scale,
            enable_gqa=True,
        )
        return out.permute(2, 0, 1, 3).flatten(2)
