"""Are these expert ids right for this router? Checks of replay targets [T, K].

Host tensors are looked at once, when they are set. Looking at ids on a device would wait for it:
they are clamped into range, and whether that changed any is kept in `replay.invalid_ids` and raised
when the indices are cleared.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from replay_patch.patching import activation
from replay_patch.refusals import Where, refuse, warn_once

if TYPE_CHECKING:
    from replay_patch.replay.action_replay import ActionReplay

# uint16/32/64 are accepted: they widen to int64, although torch has few other kernels for them.
INTEGERS = frozenset(
    {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
    | {d for n in ("uint16", "uint32", "uint64") if (d := getattr(torch, n, None)) is not None}
)


def check(
    ids: Any,
    replay: "ActionReplay",
    num_experts: int | None,
    topk: int | None,
    num_tokens: int | None = None,
) -> None:
    """Check targets as far as the arguments that are not None allow.

    `ids` is to be an int tensor [num_tokens, topk]; on the host its values are compared
    with `num_experts`. Raises RouteError, which names release, layer, what was found and expected.
    """
    if not isinstance(ids, Tensor):
        refuse(
            f"targets are {type(ids).__name__}", "a torch.Tensor [tokens, topk]", Where.of(replay)
        )
    if ids.is_nested or ids.is_meta or ids.layout is not torch.strided:
        kind = "meta" if ids.is_meta else ids.layout
        refuse(f"targets are a {kind} tensor", "a dense one", Where.of(replay))
    if ids.dtype not in INTEGERS:
        refuse(f"target dtype is {ids.dtype}", "an integer dtype", Where.of(replay))
    if ids.dim() != 2:
        refuse(f"target shape is {tuple(ids.shape)}", "[tokens, topk]", Where.of(replay))
    if topk is not None and ids.shape[1] != topk:
        refuse(f"{ids.shape[1]} experts per token", f"topk={topk}", Where.of(replay))
    if num_tokens is not None and ids.shape[0] != num_tokens:
        expected = f"{num_tokens}, one per token of this call"
        refuse(f"{ids.shape[0]} target rows", expected, Where.of(replay))
    if num_experts is not None and on_host(ids):
        _repeating_rows(ids, replay, num_experts)


def usable_ids(ids: Tensor, replay: "ActionReplay", scores: Tensor) -> tuple[Tensor, Tensor | None]:
    """Checked targets as int64 on the device of `scores` [T, E], and the rows not to be replayed.

    The rows are bool [T], True where an expert is repeated (zero-filled padding: it would break the
    count of assignments); None if it is known that there is none.
    """
    num_experts = scores.shape[1]
    wide = ids.to(scores.device, torch.int64)
    if wide.is_inference() and not torch.is_inference_mode_enabled():
        wide = wide.clone()  # gather keeps its index for the backward pass
    if on_host(ids):
        repeating = _repeating_rows(ids, replay, num_experts)
        if repeating is None:
            return wide, None
        count = int(repeating.sum())
        replay.native_rows += count
        warn_once(
            "%s: %d of %d rows of expert ids repeat an expert (zero-filled padding?); such rows "
            "route natively (REPLAY_PATCH_STRICT=1 makes this an error)",
            Where.of(replay),
            count,
            len(ids),
        )
        return wide, repeating.to(scores.device)
    in_range = wide.clamp(0, num_experts - 1)
    _defer(replay, (in_range != wide).any())
    repeating = _repeats_an_expert(in_range)
    if activation.strict():
        _defer(replay, repeating.any())
    return in_range, repeating if ids.shape[1] > 1 else None


def with_native_rows(ids: Any, mask: Any, replay: "ActionReplay") -> Tensor:
    """The ids [T, K], to be taken only where the mask [T] is true; elsewhere the native ones.
    Raises RouteError for ids or a mask of another form."""
    check(ids, replay, None, replay.topk)
    if not isinstance(mask, Tensor) or mask.dtype is not torch.bool or mask.shape != ids.shape[:1]:
        found = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask)
        refuse(f"a replay_mask of {found}", f"bool {tuple(ids.shape[:1])}", Where.of(replay))
    # What is in the other rows does not matter (zeros, -1): it must not be found wrong.
    distinct = torch.arange(ids.shape[1], dtype=ids.dtype, device=ids.device)
    masked = torch.where(mask.to(ids.device).unsqueeze(1), ids, distinct)
    _masks[masked] = mask
    return masked


def native_rows(ids: Tensor, scores: Tensor) -> Tensor | None:
    """bool [T]: the rows that `with_native_rows` left to the router; None if there are none."""
    mask = _masks.get(ids)
    return None if mask is None else ~mask.to(scores.device)


_masks: Any = WeakIdKeyDictionary()
"""Target tensor -> its mask: targets wait in queues, and this travels with them."""


def forget(ids: Any) -> None:
    """Look at `ids` again: a write through numpy or `.data` leaves no trace in the tensor."""
    if isinstance(ids, Tensor):
        _host_values.pop(ids, None)


def raise_deferred(replay: "ActionReplay") -> None:
    """Read what was found on the device since the last time; waits for the device.
    Raises RouteError if ids were out of range (with STRICT: or a row repeated an expert)."""
    flag, replay.invalid_ids = replay.invalid_ids, None
    if flag is not None and bool(flag):
        refuse(
            "expert ids on the device were out of range (or, under REPLAY_PATCH_STRICT, repeated "
            "in a row) in a step that has run since the indices were last cleared",
            "distinct ids in 0..num_experts-1; the step's result is not to be used",
            Where.of(replay),
        )


def on_host(tensor: Tensor) -> bool:
    """Whether looking at the values waits for no device."""
    return tensor.device.type == "cpu"


# --- the values of host tensors ---------------------------------------------------------------


@dataclass(frozen=True)
class _HostValues:
    """What is known of the values of a host tensor, while it is not written to."""

    version: int
    num_experts: int
    repeating: Tensor | None  # bool [T]: rows with an expert twice; None if there are none


_host_values: Any = WeakIdKeyDictionary()
"""Target tensor -> _HostValues: a target is looked at when it is set, and used in many calls."""


def _repeating_rows(ids: Tensor, replay: "ActionReplay", num_experts: int) -> Tensor | None:
    """bool [T]: the rows of host ids that have an expert twice; None if there are none.
    Raises RouteError for ids out of range, or (with STRICT) such a row."""
    if not ids.numel():
        return None
    # Inference tensors count no versions, so they are looked at each time.
    version = None if ids.is_inference() else ids._version
    values: _HostValues | None = _host_values.get(ids)
    if values is None or (values.version, values.num_experts) != (version, num_experts):
        wide = ids.to(torch.int64)
        low, high = (int(v) for v in torch.aminmax(wide))
        if low < 0 or high >= num_experts:
            row = int(((wide < 0) | (wide >= num_experts)).any(dim=1).nonzero()[0])
            refuse(
                f"row {row} has expert ids {wide[row].tolist()}",
                f"ids in 0..{num_experts - 1} (rows that were not captured cannot be marked "
                "with -1 here: give them equal ids, and they route natively)",
                Where.of(replay),
            )
        repeating = _repeats_an_expert(wide)
        values = _HostValues(version or 0, num_experts, repeating if repeating.any() else None)
        if version is not None:
            _host_values[ids] = values
    if values.repeating is not None and activation.strict():
        row = int(values.repeating.nonzero()[0])
        refuse(
            f"row {row} has expert ids {ids[row].tolist()}",
            "distinct ids in every row",
            Where.of(replay),
        )
    return values.repeating


def _repeats_an_expert(ids: Tensor) -> Tensor:
    ordered = ids.sort(dim=1).values
    return (ordered[:, 1:] == ordered[:, :-1]).any(dim=1)


def _defer(replay: "ActionReplay", flag: Tensor) -> None:
    replay.invalid_ids = flag if replay.invalid_ids is None else replay.invalid_ids | flag
