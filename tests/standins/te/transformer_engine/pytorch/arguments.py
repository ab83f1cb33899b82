"""Which arguments of a layer may be given and ignored."""

from collections.abc import Mapping
from typing import Any

# Groups and random states of one process, names, and what only makes it faster.
IGNORED = {"tp_group", "get_rng_state_tracker", "rng_tracker_name", "ub_name", "name"}
IGNORED |= {"cp_group", "cp_global_ranks", "cp_stream", "layer_number", "attention_type"}
IGNORED |= {"qkv_format", "parallel_mode", "attn_mask_type", "ub_overlap_ag", "ub_overlap_rs"}


def refuse(layer: str, arguments: Mapping[str, Any]) -> None:
    """Raise unless what was given has no effect here."""
    for name, value in arguments.items():
        harmless = value is None or value is False or (type(value) is int and value in (0, 1))
        if name not in IGNORED and not harmless:
            raise NotImplementedError(f"Transformer Engine stand-in, {layer}: {name}={value!r}")
