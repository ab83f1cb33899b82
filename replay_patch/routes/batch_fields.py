"""Choosing among trajectories, in routes and in everything else that is kept beside them."""

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from replay_patch.errors import RouteError
from replay_patch.routes.arguments import host_list


def select_fields(
    fields: Mapping[str, Any], indices: Any, *, shared: Iterable[str] = ()
) -> dict[str, Any]:
    """Every per-trajectory field of a batch for the chosen trajectories, in the chosen order.

    For dynamic sampling, filtering, reordering and repeating: routes that stay behind when the rest
    is filtered belong to other trajectories then, and nothing else would tell.

    Args:
        fields: by name: lists, tuples, arrays, tensors (dense or nested, on any device),
            `RouteBatch`, or mappings of such, which keep their type. None is an absent field, and
            stays None.
        indices: trajectories from 0, in the order wanted; or bool, one for each trajectory.
        shared: names of fields that are not per trajectory; they are passed on as they are.

    Raises:
        RouteError: a field of another number of trajectories than the others, or without one (it
            names the field); an index that is out of range.
    """
    shared_names = set(shared)
    unknown = sorted(shared_names - set(fields))
    if unknown:
        raise RouteError(f"shared names {unknown}: there is no such field, only {list(fields)}")
    sizes = dict(_sizes({k: v for k, v in fields.items() if k not in shared_names}, ""))
    first, count = next(iter(sizes.items()), ("", 0))
    for name, size in sizes.items():
        if size != count:
            raise RouteError(
                f"field {name!r} has {size} entries: expected {count}, one for each trajectory, "
                f"as field {first!r} has"
            )
    chosen = chosen_indices(indices, count)
    return {k: v if k in shared_names else _select(v, chosen) for k, v in fields.items()}


def chosen_indices(indices: Any, count: int) -> list[int]:
    """Integers from 0 to count - 1, from integers or `count` bools: list, array or host tensor. -1
    is refused: elsewhere it means the last, and here nothing."""
    entries = host_list("indices", indices, "integers, or one bool for each trajectory")
    if entries and all(isinstance(entry, bool | np.bool_) for entry in entries):
        if len(entries) != count:
            raise RouteError(f"indices are {len(entries)} bools: expected {count}, one for each")
        return [index for index, entry in enumerate(entries) if entry]
    return [_index(number, entry, count) for number, entry in enumerate(entries)]


def _index(number: int, entry: Any, count: int) -> int:
    try:
        if isinstance(entry, bool | np.bool_):
            raise TypeError("a bool among integers")
        index = operator.index(entry)
    except TypeError:
        index = -1
    if not 0 <= index < count:
        raise RouteError(f"indices[{number}] is {entry!r}: expected a place from 0 to {count - 1}")
    return index


def _sizes(fields: Mapping[str, Any], prefix: str) -> Iterable[tuple[str, int]]:
    for key, value in fields.items():
        name = f"{prefix}{key}"
        if value is None:
            continue
        if isinstance(value, Mapping):
            yield from _sizes(value, f"{name}.")
        elif isinstance(value, Tensor | np.ndarray) and value.ndim:
            yield name, value.size(0) if isinstance(value, Tensor) else len(value)
        elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
            yield name, len(value)
        else:
            raise RouteError(
                f"field {name!r} is a {type(value).__name__}, and has no trajectories: expected a "
                "list, an array, a tensor or a RouteBatch; or name it in shared=..."
            )


def _select(value: Any, chosen: list[int]) -> Any:
    if value is None:
        return None
    if isinstance(value, Mapping):
        return {key: _select(entry, chosen) for key, entry in value.items()}
    if isinstance(value, Tensor):
        if value.is_nested:
            parts = value.unbind()
            return torch.nested.as_nested_tensor([parts[i] for i in chosen], layout=value.layout)
        return value.index_select(0, torch.tensor(chosen, dtype=torch.int64).to(value.device))
    if isinstance(value, np.ndarray):
        return value[np.array(chosen, dtype=np.int64)]
    if hasattr(value, "select"):
        return value.select(chosen)
    picked = [value[i] for i in chosen]
    return tuple(picked) if isinstance(value, tuple) else picked
