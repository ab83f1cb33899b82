"""MindSpeed's arguments: what its features declare, and whatever else the command line holds."""

import argparse
import sys
from itertools import pairwise
from typing import Any

_DEFAULTS = {
    "moe_zero_memory_num_layers": None,  # one of those that only MindSpeed's own validation reads
    "variable_seq_lengths": False,  # the one that is a field of Megatron's config, too
}
_args: argparse.Namespace | None = None


def get_mindspeed_args() -> argparse.Namespace:
    """The command line as it was at the first call. An option that nobody knows is True, or the
    word after it, as a string."""
    global _args
    if _args is None:
        words = [*sys.argv[1:], "-"]
        unknown: dict[str, Any] = {
            word.lstrip("-").replace("-", "_"): True if after.startswith("-") else after
            for word, after in pairwise(words)
            if word.startswith("-")
        }
        _args = argparse.Namespace(**_DEFAULTS | unknown)
    return _args


def get_full_args() -> argparse.Namespace:
    """The arguments of megatron.training once it has some, else MindSpeed's own."""
    training = sys.modules.get("megatron.training.global_vars")
    args: argparse.Namespace | None = getattr(training, "_GLOBAL_ARGS", None)
    return get_mindspeed_args() if args is None else args
