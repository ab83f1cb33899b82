"""Which arguments of a layer may be given and ignored."""

from collections.abc import Mapping
from typing import Any

# Groups and random states of one process, names, and what only makes it faster.
IGNORED = {"tp_group", "get_rng_state_tracker", "rng_tracker_name", "ub_name", "name"}
IGNORED |= {"cp_group", "cp_global_ranks", "cp_stream", "layer_number", "attention_type"}
IGNORED |= {"qkv_format", "parallel_mode", "attn_mask_type", "ub_overlap_ag", "ub_overlap_rs"}


def refuse(layer: str, arguments: Mapping[str, Any]) -> None:
    """Raise unless what was given has no effect here."""
    harmless = (None, False, 0, 1)
    for name, value in arguments.items():
        if name not in IGNORED and not (isinstance(value, (int, type(None))) and value in harmless):
            raise NotImplementedError(
                f"the Transformer Engine stand-in's {layer}: {name}={value!r}"
            )
    if (arguments.get("tp_size") or 1) > 1:
        raise NotImplementedError(f"the Transformer Engine stand-in's {layer}: tensor parallelism")
