"""A token layout against the rank and the pipeline stage that it is loaded on."""

from typing import Any

import torch
from torch import Tensor

from replay_patch.device_copies import to_device
from replay_patch.errors import LayoutError
from replay_patch.megatron.parallel_ranks import ParallelRanks


def check_rank(layout: Any, config: Any) -> None:
    """Refuse a layout that was made for another rank: it would have the right number of rows.

    Args:
        layout: a TokenLayout; one without a cut, or what is no layout, is left to later checks.
        config: of the chunk.

    Raises:
        LayoutError: the layout is cut for other ranks than this one and its config.
    """
    cut = getattr(layout, "cut", None)
    if cut is None:
        return
    ranks = ParallelRanks.of(config)
    expected = {"cp_size": ranks.cp_size, "cp_rank": ranks.cp_rank}
    if cut.sequence_parallel and cut.tp_size > 1:
        expected |= {"tp_size": ranks.tp_size, "tp_rank": ranks.tp_rank}
    found = {name: getattr(cut, name) for name in expected}
    if found != expected:
        raise LayoutError(f"the layout is for {found}: this rank and its config are {expected}")


def mask_of_stage(chunk: Any, config: Any, device: torch.device, layout: Any) -> Tensor:
    """The padding mask in the shape that this stage takes, on its device.

    The first stage takes [B, S] and scatters it itself over sequence-parallel ranks; a later one
    takes this rank's part of S, as its hidden states are.

    Raises:
        LayoutError: S cannot be cut for sequence parallelism.
    """
    mask: Tensor = layout.padding_mask
    ranks = ParallelRanks.of(config)
    if ranks.sequence_parts > 1 and not getattr(chunk, "pre_process", True):
        if mask.shape[1] % ranks.sequence_parts:
            raise LayoutError(
                f"{mask.shape[1]} positions: expected a multiple of {ranks.sequence_parts} for "
                "sequence parallelism"
            )
        mask = ranks.own_part(mask, dim=1).contiguous()
    return to_device(mask, device)
