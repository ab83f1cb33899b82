"""Where this process is among the ranks, and what follows for layouts, masks and chunks."""

import inspect
from collections.abc import Sequence
from typing import Any

from replay_patch.device_copies import to_device
from replay_patch.errors import LayoutError


def check_rank(layout: Any, config: Any) -> None:
    """Refuse a layout that was made for another rank: it would have the right number of rows."""
    cut = getattr(layout, "cut", None)
    if cut is None:
        return
    cp_size = getattr(config, "context_parallel_size", 1)
    expected = {"cp_size": cp_size, "cp_rank": cp_rank() if cp_size > 1 else 0}
    if cut.sequence_parallel and cut.tp_size > 1:
        expected |= {"tp_size": config.tensor_model_parallel_size, "tp_rank": tp_rank()}
    found = {name: getattr(cut, name) for name in expected}
    if found != expected:
        raise LayoutError(f"the layout is for {found}: this rank and its config are {expected}")


def takes_mask(chunk: Any) -> bool:
    """Whether this Megatron's own model takes `padding_mask` (from 0.16 on)."""
    return "padding_mask" in inspect.signature(chunk.forward).parameters


def mask_of_stage(chunk: Any, config: Any, device: Any, layout: Any) -> Any:
    """The padding mask in the shape that this stage takes.

    The first stage takes [B, S] and scatters it itself over sequence-parallel ranks; a later one
    takes this rank's part of S, as its hidden states are.

    Raises:
        LayoutError: S cannot be cut for sequence parallelism.
    """
    mask = layout.padding_mask
    size = config.tensor_model_parallel_size
    if config.sequence_parallel and size > 1 and not getattr(chunk, "pre_process", True):
        if mask.shape[1] % size:
            raise LayoutError(
                f"{mask.shape[1]} positions: expected a multiple of {size} for sequence parallelism"
            )
        mask = mask.chunk(size, dim=1)[tp_rank()].contiguous()
    return to_device(mask, device)


# --- ranks ------------------------------------------------------------------------------------


def data_rank(config: Any) -> int:
    """A number that ranks with other tokens do not share; ranks with the same tokens do."""
    state = _parallel_state()
    if state is None:
        return 0
    rank = int(state.get_data_parallel_rank(with_context_parallel=True))
    # alltoall_seq (0.12): the routers of all tensor-parallel ranks see all their rows.
    if config.sequence_parallel and config.moe_token_dispatcher_type != "alltoall_seq":
        rank = rank * config.tensor_model_parallel_size + tp_rank()
    return rank


def pp_rank() -> int:
    """This process's; 0 without process groups, as those below."""
    state = _parallel_state()
    return 0 if state is None else int(state.get_pipeline_model_parallel_rank())


def tp_rank() -> int:
    """This process's."""
    state = _parallel_state()
    return 0 if state is None else int(state.get_tensor_model_parallel_rank())


def cp_rank() -> int:
    """This process's."""
    state = _parallel_state()
    return 0 if state is None else int(state.get_context_parallel_rank())


def vp_stages(chunk: Any, config: Any, index: int, chunks: int) -> Sequence[int | None]:
    """The virtual stages that a chunk may be; several if nothing tells (0.12, some chunks only)."""
    size = getattr(config, "virtual_pipeline_model_parallel_size", None)
    if size is None:
        return [None]
    own = getattr(chunk, "vp_stage", None)
    if own is not None:
        return [own]
    return [index] if chunks == size else range(size)


def _parallel_state() -> Any:
    from megatron.core import parallel_state

    return parallel_state if parallel_state.model_parallel_is_initialized() else None
