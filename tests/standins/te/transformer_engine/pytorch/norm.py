"""LayerNorm and RMSNorm."""

from typing import Any

import torch
from torch.nn import functional

from transformer_engine.pytorch.arguments import refuse


class _Norm(torch.nn.Module):
    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        zero_centered_gamma: bool = False,
        params_dtype: torch.dtype | None = None,
        device: Any = None,
        **rest: Any,
    ) -> None:
        super().__init__()
        refuse(type(self).__name__, rest)
        self.eps, self.zero_centered = eps, zero_centered_gamma
        made = torch.zeros if zero_centered_gamma else torch.ones
        self.weight = torch.nn.Parameter(made(hidden_size, dtype=params_dtype, device=device))
        if isinstance(self, LayerNorm):
            bias = torch.zeros(hidden_size, dtype=params_dtype, device=device)
            self.bias = torch.nn.Parameter(bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = getattr(self, "bias", None)
        return normalise(x, self.weight, bias, self.eps, self.zero_centered)


class LayerNorm(_Norm): ...


class RMSNorm(_Norm): ...


def normalise(x: Any, weight: Any, bias: Any, eps: float, zero_centered: bool) -> torch.Tensor:
    """LayerNorm if there is a bias, else RMSNorm."""
    weight = weight + 1 if zero_centered else weight
    if bias is None:
        return functional.rms_norm(x, weight.shape, weight, eps)
    return functional.layer_norm(x, weight.shape, weight, bias, eps)
