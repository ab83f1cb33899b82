"""`CheckedRoutes`: the fields of a `Routes`, with which the modules below that class work.

T tokens (rows), L layers, K top-k.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from replay_patch.routes.layer_axis import Layers

CAUSES = ("", "out of range", "repeating", "unwritten", "missing", "mismatch")
"""Why a row that an engine returned is not in the routes; `notes` holds places in this list."""
OUT_OF_RANGE, REPEATING, UNWRITTEN, MISSING, MISMATCH = range(1, len(CAUSES))


@dataclass(frozen=True, eq=False)
class CheckedRoutes:
    """One piece of a trajectory, known to be right. `Routes` says what each field means."""

    expert_ids: Tensor
    captured: Tensor
    num_experts: int
    start: int
    layers: Layers
    empty_layers: tuple[int, ...]
    notes: Tensor | None


def with_cause(notes: Tensor | None, tokens: Tensor, cause: int) -> Tensor:
    """uint8 [T]: `notes`, and `cause` where `tokens`, bool [T], is True."""
    if notes is None:
        notes = torch.zeros(len(tokens), dtype=torch.uint8)
    return notes.masked_fill(tokens, cause)
