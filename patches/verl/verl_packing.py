"""Without this patch recording fails in verl 0.7.1, and so does replaying: its helpers expect other
results of the function that packs sequences, and give it routes, which it cannot pack."""

import sys
import types
from collections.abc import Callable
from typing import Any

from replay_patch.patching import Patch, Transaction, probe
from replay_patch.patching.rebinding import with_globals

_MODULE = "verl.utils.megatron.router_replay_utils"
_PACK = "preprocess_thd_no_padding"
_RECORD = f"{_MODULE}:merge_router_topk_indices"


def _needed() -> tuple[bool, str]:
    pack = getattr(sys.modules[_MODULE], _PACK, None)
    if pack is None:
        return False, "the helpers pack with another function"
    ids = _nested([3, 2])
    results, taken = len(_without_process_groups(pack)(ids)), _results_taken()
    try:
        _without_process_groups(pack)(_nested([3, 2], 1, 2))
        routes = "packs"
    except RuntimeError:
        routes = "does not pack"
    reason = f"{_PACK} returns {results} results, recording takes {taken}; it {routes} routes"
    return results != taken or routes != "packs", reason


def _apply(transaction: Transaction) -> None:
    module = sys.modules[_MODULE]
    packing = _packing_by_row_number(getattr(module, _PACK), _results_taken())
    transaction.set(module, _PACK, packing)


def _packing_by_row_number(original: Callable[..., Any], taken: int) -> Callable[..., Any]:
    """Where a row is more than one number, pack row numbers, and look the rows up by them."""
    import torch

    def preprocess_thd_no_padding(sequences: Any, *args: Any, **kwargs: Any) -> Any:
        if sequences.dim() == 2:  # tokens: recording
            return original(sequences, *args, **kwargs)[:taken]
        rows, offsets = sequences.values(), sequences.offsets()
        numbers = torch.arange(1, len(rows) + 1, device=rows.device)  # 0 is what padding gets
        nested = torch.nested.nested_tensor_from_jagged(numbers, offsets=offsets)
        packed, *others = original(nested, *args, **kwargs)
        return torch.cat([rows.new_zeros(1, *rows.shape[1:]), rows])[packed], *others

    return preprocess_thd_no_padding


def _results_taken() -> int:
    """Into how many names recording unpacks the results."""
    [line] = [line for line in probe.source(_RECORD).splitlines() if f"= {_PACK}(" in line]
    return len(line.partition("=")[0].split(","))


def _without_process_groups(pack: Callable[..., Any]) -> Callable[..., Any]:
    """The packing function as it is on one rank, without process groups."""
    ranks = types.SimpleNamespace(
        get_tensor_model_parallel_world_size=lambda: 1,
        get_context_parallel_world_size=lambda: 1,
        get_context_parallel_rank=lambda: 0,
    )
    return with_globals(pack, {"mpu": ranks})


def _nested(lengths: list[int], *more: int) -> Any:
    import torch

    parts = [torch.zeros(length, *more, dtype=torch.long) for length in lengths]
    return torch.nested.as_nested_tensor(parts, layout=torch.jagged)


PATCH = Patch(
    name="verl_packing",
    library="verl",
    targets=(f"{_MODULE}:{_PACK}",),
    modules=(_MODULE,),
    requires="verl",
    why=(
        "In 0.7.1 this function returns three results, of which recording takes two: R2 fails in "
        "the first old-log-prob pass of verl's engine. It also makes positions of the shape of "
        "what it packs, and so fails on routes, of R2 and R3 alike."
    ),
    how=(
        "In the helpers' module it returns for tokens as many results as recording takes; of "
        "routes it packs the row numbers, by which the rows are then gathered."
    ),
    upstream="https://github.com/volcengine/verl/pull/5891",
    remove_when="verl 0.7 is no longer supported",
    needed=_needed,
    apply=_apply,
)
