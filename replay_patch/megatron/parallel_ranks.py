"""Where this process is among the parallel ranks, and which router rows it therefore has.

Tensor parallelism (tp) shares layers, sequence parallelism (sp) cuts the positions of a sequence
over the same ranks, context parallelism (cp) cuts them again, pipeline parallelism (pp) gives each
rank other layers, and virtual stages give it several pieces of the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class ParallelRanks:
    """The ranks that share the tokens of a microbatch, as a config has them.

    Attributes:
        tp_size: tensor-parallel ranks.
        cp_size: context-parallel ranks.
        sequence_parallel: whether each tensor-parallel rank has a part of the positions only.
        gathers_rows: whether a router sees the rows of all tensor-parallel ranks all the same.
    """

    tp_size: int
    cp_size: int
    sequence_parallel: bool
    gathers_rows: bool

    @classmethod
    def of(cls, config: Any) -> "ParallelRanks":
        """Those of a TransformerConfig. Asks no process group."""
        return cls(
            getattr(config, "tensor_model_parallel_size", 1),
            getattr(config, "context_parallel_size", 1),
            bool(config.sequence_parallel),
            gathers_rows(config),
        )

    @property
    def tp_rank(self) -> int:
        """This process's."""
        return tp_rank()

    @property
    def cp_rank(self) -> int:
        """This process's; 0 where there is one only."""
        return cp_rank() if self.cp_size > 1 else 0

    @property
    def sequence_parts(self) -> int:
        """Into how many parts sequence parallelism cuts the positions; 1 without."""
        return self.tp_size if self.sequence_parallel else 1

    def own_part(self, tensor: Tensor, dim: int) -> Tensor:
        """What sequence parallelism leaves this rank of a tensor with its positions along `dim`."""
        if self.sequence_parts == 1:
            return tensor
        return tensor.chunk(self.sequence_parts, dim=dim)[self.tp_rank]

    @property
    def data_rank(self) -> int:
        """A number that ranks share if their routers see the same tokens, and only then."""
        state = _parallel_state()
        if state is None:
            return 0
        rank = int(state.get_data_parallel_rank(with_context_parallel=True))
        if self.sequence_parallel and not self.gathers_rows:
            rank = rank * self.tp_size + self.tp_rank
        return rank


def gathers_rows(config: Any) -> bool:
    """Whether routers gather the rows of all tensor-parallel ranks before they select (0.12)."""
    return bool(config.moe_token_dispatcher_type == "alltoall_seq")


def vp_stages(chunk: Any, config: Any, index: int, chunks: int) -> Sequence[int | None]:
    """The virtual stages that a chunk may be; several if nothing tells (0.12, some chunks only).
    `chunk`: unwrapped; `index`: its place among this rank's chunks at hand; `chunks`: their number.
    """
    size = getattr(config, "virtual_pipeline_model_parallel_size", None)
    if size is None:
        return [None]
    own = getattr(chunk, "vp_stage", None)
    if own is not None:
        return [own]
    return [index] if chunks == size else range(size)


def pp_rank() -> int:
    """The pipeline rank of this process; 0 without process groups."""
    state = _parallel_state()
    return 0 if state is None else int(state.get_pipeline_model_parallel_rank())


def tp_rank() -> int:
    """The tensor-parallel rank of this process; 0 without process groups."""
    state = _parallel_state()
    return 0 if state is None else int(state.get_tensor_model_parallel_rank())


def cp_rank() -> int:
    """The context-parallel rank of this process; 0 without process groups."""
    state = _parallel_state()
    return 0 if state is None else int(state.get_context_parallel_rank())


def _parallel_state() -> Any:
    from megatron.core import parallel_state

    return parallel_state if parallel_state.model_parallel_is_initialized() else None
