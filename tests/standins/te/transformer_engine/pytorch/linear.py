"""Linear, LayerNormLinear and GroupedLinear."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from transformer_engine.pytorch.arguments import refuse
from transformer_engine.pytorch.norm import normalise


class _Linear(torch.nn.Module):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        return_bias: bool = False,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        parallel_mode: str | None = None,
        params_dtype: torch.dtype | None = None,
        device: Any = None,
        **rest: Any,
    ) -> None:
        super().__init__()
        refuse(type(self).__name__, rest)
        self.in_features, self.out_features = in_features, out_features
        self.use_bias, self.return_bias, self.parallel_mode = bias, return_bias, parallel_mode
        self.tp_size = 1
        self._init_method = init_method or torch.nn.init.normal_
        self._where: dict[str, Any] = {"dtype": params_dtype, "device": device}

    def _parameters_named(self, end: str = "") -> None:
        weight = torch.empty(self.out_features, self.in_features, **self._where)
        with torch.no_grad():
            self._init_method(weight)
        self.register_parameter(f"weight{end}", torch.nn.Parameter(weight))
        bias = torch.nn.Parameter(torch.zeros(self.out_features, **self._where))
        self.register_parameter(f"bias{end}", bias if self.use_bias else None)

    def _result(self, out: torch.Tensor, bias: Any) -> Any:
        return (out, bias) if self.return_bias else out


class Linear(_Linear):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._parameters_named()

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        added = None if self.return_bias else self.bias
        return self._result(functional.linear(x, self.weight, added), self.bias)


class LayerNormLinear(Linear):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(in_features, out_features, **kwargs)
        refuse(type(self).__name__, {"return_layernorm_output": return_layernorm_output or None})
        self.eps, self.zero_centered = eps, zero_centered_gamma
        made = torch.zeros if zero_centered_gamma else torch.ones
        self.layer_norm_weight = torch.nn.Parameter(made(in_features, **self._where))
        bias = torch.nn.Parameter(torch.zeros(in_features, **self._where))
        layer_norm = {"LayerNorm": bias, "RMSNorm": None}[normalization]
        self.register_parameter("layer_norm_bias", layer_norm)

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        norm = (self.layer_norm_weight, self.layer_norm_bias, self.eps, self.zero_centered)
        return super().forward(normalise(x, *norm))


class GroupedLinear(_Linear):
    def __init__(self, num_gemms: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_gemms = num_gemms
        for i in range(num_gemms):
            self._parameters_named(str(i))

    def forward(
        self, x: torch.Tensor, m_splits: Sequence[int], is_first_microbatch: bool | None = None
    ) -> Any:
        weights = [getattr(self, f"weight{i}") for i in range(self.num_gemms)]
        biases = [getattr(self, f"bias{i}") for i in range(self.num_gemms)]
        added = [None if self.return_bias else bias for bias in biases]
        parts = x.split([int(n) for n in m_splits])
        outs = [functional.linear(*each) for each in zip(parts, weights, added, strict=True)]
        return self._result(torch.cat(outs), biases)
