"""Which rows of a router's input are padding, and the router at work on them.

For releases whose routers take no `padding_mask` (0.12 ... 0.15). True = padding, as Megatron's
code has it (its docstrings say the reverse). B sequences, S positions, R router rows
(sequence-major: row = s * B + b), E experts.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from replay_patch.errors import LayoutError
from replay_patch.megatron.parallel_ranks import ParallelRanks
from replay_patch.refusals import refuse
from replay_patch.replay.per_thread import PerThread
from replay_patch.routes.device_copies import to_device


class Rows:
    """The rows that some router sees. `mask`: bool [R], True = padding; `device`: where the router
    computes. Nothing waits for the device if the mask is still on the host."""

    def __init__(self, mask: Tensor, device: torch.device) -> None:
        self.number = len(mask)
        self._real, self._device = ~mask, device
        self._totals: dict[Any, Tensor] = {}

    @functools.cached_property
    def real(self) -> Tensor:
        """bool [R, 1]."""
        return to_device(self._real.unsqueeze(1), self._device)

    @functools.cached_property
    def index(self) -> Tensor:
        """int64 [V]: the rows that are no padding. Waits for the device if the mask is there."""
        return to_device(self._real.nonzero().flatten(), self._device)

    @functools.cached_property
    def count(self) -> Tensor:
        """V, a scalar tensor."""
        return to_device(self._real.sum(), self._device)

    def total(self, group: Any) -> Tensor:
        """V of all ranks of a process group (None: of this one); collective, once per group."""
        if group is None or group.size() == 1:
            return self.count
        if group not in self._totals:
            # HCCL sums int64 slowly on Atlas A2, and only within one node on Ascend 950 (CANN's
            # page of HcclAllReduce); int32 everywhere, as NCCL and gloo.
            total = self.count.to(torch.int32)
            torch.distributed.all_reduce(total, group=group)
            self._totals[group] = total
        return self._totals[group]

    def scale(self, real: Tensor, ranks: int) -> Tensor:
        """What a loss that was divided by the square of all rows has to be multiplied by.
        `real`: the rows of all ranks that are no padding (0 is taken for 1); each rank has R rows.
        """
        return (self.number * ranks / real.clamp(min=1)).square()


class Padding:
    """The padding of one model call on this rank, in the rows of its routers.

    Args:
        mask: bool [S, B] of the rows before sequence parallelism cuts them.
        device: of the model.
        ranks: whose sequence parallelism cuts the mask; None: it is for this rank's rows only.
    """

    def __init__(
        self, mask: Tensor, device: torch.device, ranks: ParallelRanks | None = None
    ) -> None:
        if ranks is None or ranks.sequence_parts == 1:
            self._rows = [Rows(mask.flatten(), device)]
        else:
            # alltoall_seq (0.12): z-loss sees this rank's rows, all that follows those of all.
            own = ranks.own_part(mask, dim=0)
            self._rows = [Rows(own.flatten(), device), Rows(mask.flatten(), device)]

    def rows(self, number: int, router: Any) -> Rows:
        """The rows of a router that has `number` of them; LayoutError if the mask is for others."""
        for rows in self._rows:
            if rows.number == number:
                return rows
        raise LayoutError(
            f"layer {router.layer_number}: the router has {number} rows, and the padding mask is "
            f"for {' or '.join(str(rows.number) for rows in self._rows)}"
        )


padding_at_work: PerThread[Padding] = PerThread()
"""The padding of the router whose forward runs."""


def rows_at_work(router: Any, number: int) -> Rows | None:
    """The rows of the router whose forward runs; None: all of them count.
    Raises LayoutError if the mask is for more or fewer rows than `number`."""
    padding = padding_at_work.get()
    return None if padding is None else padding.rows(number, router)


def run_with_padding(router: Any, padding: Padding, forward: Callable[[], Any]) -> Any:
    """Run a router's forward with rows that do not count."""
    with padding_at_work.during(padding):
        return count_for_bias(router, forward, lambda number: padding.rows(number, router).real)


class SumOfRows(TorchFunctionMode):
    """While it is on, the sum of a bool [R, E] over its rows leaves out those of padding."""

    def __init__(self, rows: Rows) -> None:
        super().__init__()
        self._rows = rows

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.sum and args[0].dtype is torch.bool and kwargs.get("dim") == 0:
            args = (args[0] & self._rows.real, *args[1:])
        return func(*args, **kwargs)


_counted_inside: PerThread[list[Tensor]] = PerThread()
"""What the calls of `count_for_bias` inside of the one that runs have counted."""


def count_for_bias(
    router: Any, forward: Callable[[], Any], counted_rows: Callable[[int], Tensor]
) -> Any:
    """Run a router's forward, which returns (probs, map); the expert bias counts only some rows.

    `counted_rows(R)` gives those that count, bool [R, 1]. What the release's own code has added to
    `local_tokens_per_expert` is replaced by a sum of the map over these rows. In a call around
    another one, the rows count that both count.
    """
    if not getattr(router, "enable_expert_bias", False) or not torch.is_grad_enabled():
        return forward()
    outer, counted = _counted_inside.get(), list[Tensor]()
    tokens_before = router.local_tokens_per_expert.clone()
    with _counted_inside.during(counted):
        probs_and_map = forward()
    routing_map = probs_and_map[1]
    counted.append(counted_rows(len(routing_map)))
    if outer is not None:
        outer += counted
    with torch.no_grad():
        choices = functools.reduce(torch.logical_and, counted, routing_map.bool())
        router.local_tokens_per_expert.copy_(tokens_before + choices.sum(dim=0))
    return probs_and_map


# --- where a mask enters ------------------------------------------------------------------------


def padding_of_model_call(model: Any, mask: Any, input_ids: Any, hidden: Any) -> Padding:
    """The padding of a call of a GPTModel, of any pipeline stage.

    Args:
        mask: bool [B, S], S cut for context parallelism, and not for sequence parallelism. Where
            hidden states enter, it may be cut for that already, as 0.16 and later want it there.
        input_ids: [B, S] where the model embeds them, else None.
        hidden: [S, B, H] that enters otherwise (S cut for sequence parallelism), None if not known.
    Raises:
        LayoutError: it is no such mask.
    """
    ranks = ParallelRanks.of(model.config)
    parts = ranks.sequence_parts
    check_mask(mask)
    expected = [tuple(mask.shape)]
    if input_ids is not None:
        expected = [tuple(input_ids.shape)]
    elif hidden is not None:
        length, batch = hidden.shape[:2]
        expected = [(batch, length * parts), (batch, length)]
    if tuple(mask.shape) not in expected:
        refuse_shape(mask, expected[0], "the model input")
    is_cut = tuple(mask.shape) != expected[0]
    if is_cut and ranks.gathers_rows:
        refuse(
            "a padding mask that is cut for sequence parallelism, with alltoall_seq",
            "the whole mask: this router gathers the rows of all tensor-parallel ranks",
        )
    if mask.shape[1] % parts and not is_cut:
        refuse_shape(mask, (mask.shape[0], f"a multiple of {parts}"), "sequence parallelism")
    device = next((p.device for p in model.parameters()), mask.device)
    return Padding(mask.t(), device, None if is_cut else ranks)


def padding_of_session(model: Any, mask: Tensor, input_ids: Any, hidden: Any) -> Padding | None:
    """`padding_of_model_call` with a session's mask, bool [B, S]. None if it has another number of
    tokens than the call: the session's routers then refuse it, and know better what is wrong."""
    tokens = mask.numel()
    if input_ids is not None:
        tokens = input_ids.numel()
    elif hidden is not None:
        tokens = hidden.shape[:2].numel() * ParallelRanks.of(model.config).sequence_parts
    if tokens != mask.numel():
        return None
    return padding_of_model_call(model, mask, input_ids, hidden)


def padding_of_router_call(router: Any, mask: Any, hidden: Tensor) -> Padding:
    """The padding of one router call that is given a mask itself.
    `mask`: bool [S, B] or [R], of exactly the rows of `hidden` [S, B, H]; otherwise LayoutError."""
    check_mask(mask)
    shape = hidden.shape[:-1]
    if mask.shape not in (shape, (shape.numel(),)):
        where = f"the input of the router of layer {router.layer_number}"
        refuse_shape(mask, tuple(shape), where)
    return Padding(mask.reshape(-1, 1), hidden.device)


def mask_of_layer(layer: Any, mask: Tensor, hidden: Any) -> Tensor:
    """The part of a mask that is for the hidden states of an MoE layer; the mask itself if it fits.
    `mask`: [B, S], S of this rank's rows, or of those of all ranks of sequence parallelism (else
    LayoutError); `hidden`: [S, B, H] of this rank."""
    if not isinstance(hidden, Tensor) or hidden.dim() != 3:
        return mask  # a later part of a layer that runs in pieces
    length, batch = hidden.shape[:2]
    if mask.shape == (batch, length):
        return mask
    ranks = ParallelRanks.of(layer.config)
    if ranks.sequence_parts == 1 or mask.shape != (batch, length * ranks.sequence_parts):
        where = f"layer {layer.layer_number} (B, S of its hidden states)"
        refuse_shape(mask, (batch, length), where)
    return ranks.own_part(mask, dim=1).contiguous()


def check_mask(mask: Any) -> None:
    """Raise LayoutError for what is no bool tensor."""
    if not isinstance(mask, Tensor) or mask.dtype is not torch.bool:
        found = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise LayoutError(
            f"padding_mask is {found}: expected a bool tensor [B, S], True where a token is padding"
        )


def refuse_shape(mask: Tensor, expected: tuple[Any, ...], of: str) -> None:
    """Raise LayoutError for a mask of another shape."""
    raise LayoutError(
        f"padding_mask has the shape {list(mask.shape)}: expected {list(expected)}, that of {of}"
    )
