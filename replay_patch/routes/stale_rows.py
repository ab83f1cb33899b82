"""Rows that no router chose: a buffer that was never written. T tokens, L layers, K top-k.

Two signs, both counted and never silent:
* Zeros in every layer, for K > 1: no router takes an expert twice.
* The same experts in the same order, in all layers, for many tokens in a row. As that could be
  chance in a tiny model, a run must be at least 16 tokens long, and less likely than 2**-128 if
  routers chose evenly.
"""

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from replay_patch.routes.expert_ids import CheckedRoutes

_LEAST_RUN = 16
_BITS = 128


def zero_rows(ids: NDArray[Any]) -> NDArray[np.bool_]:
    """bool [T] of ids [T, L, K]: nothing but zeros, if that cannot be a choice."""
    tokens, num_layers, topk = ids.shape
    if topk < 2 or not num_layers:
        return np.zeros(tokens, np.bool_)
    zeros: NDArray[np.bool_] = (ids[:, -1] == 0).all(1)  # the last layer is hardly ever a dense one
    candidates = np.flatnonzero(zeros)  # few
    zeros[candidates] = (ids[candidates] == 0).all((1, 2))
    return zeros


def longest_run(num_experts: int, num_layers: int, topk: int) -> int:
    """How many tokens in a row may have the same experts in all layers."""
    sizes = (num_experts, topk, num_experts - topk)
    ways, chosen, left = (math.lgamma(size + 1) / math.log(2) for size in sizes)
    bits = num_layers * (ways - chosen - left)  # of one token's row, if experts were even
    if bits < 1e-6:  # all experts, always
        return 2**31
    return max(_LEAST_RUN, math.ceil(_BITS / bits - 1e-6) + 1) - 1


def repeated_rows(routes: CheckedRoutes, longest: int) -> Tensor:
    """bool [T]: captured tokens in runs of more than `longest` equal rows."""
    ids, captured = routes.expert_ids, routes.captured
    repeated = torch.zeros(len(ids), dtype=torch.bool)
    live = [i for i in range(ids.shape[1]) if i not in routes.empty_layers]
    if len(ids) <= longest or not live:
        return repeated
    # One layer rules out nearly all tokens; the others are looked at only where it does not.
    same = (ids[1:, live[-1]] == ids[:-1, live[-1]]).all(1) & captured[1:] & captured[:-1]
    for run in _runs(same, longest):
        rows = ids[run.start : run.stop + 1]
        same[run] = (rows[1:] == rows[:-1]).flatten(1).all(1)
    for run in _runs(same, longest):
        repeated[run.start : run.stop + 1] = True
    return repeated


def _runs(same: Tensor, longest: int) -> list[slice]:
    """Stretches of at least `longest` pairs of equal neighbours."""
    outside = torch.zeros(1, dtype=torch.int8)
    edges = torch.diff(same.to(torch.int8), prepend=outside, append=outside)
    starts, ends = (edges == 1).nonzero().flatten(), (edges == -1).nonzero().flatten()
    long = ends - starts >= longest
    pairs = zip(starts[long].tolist(), ends[long].tolist(), strict=True)
    return [slice(start, end) for start, end in pairs]
