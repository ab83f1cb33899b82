"""What the layer axis of routes means: the number of the layer at each place."""

from collections.abc import Iterable

from replay_patch.errors import RouteError
from replay_patch.routes.arguments import layer_numbers

Layers = str | tuple[int, ...]
"""What `Routes.layers` says: "moe", "all" or the layer numbers."""


def checked_layers(layers: str | Iterable[int], num_layers: int) -> Layers:
    """The `layers` argument for an axis of so many layers, as `Routes.layers` says it."""
    if isinstance(layers, str):
        if layers not in ("moe", "all"):
            raise RouteError(
                f"layers={layers!r}: expected 'moe', 'all' or a tuple of layer numbers"
            )
        return layers
    numbers = layer_numbers("layers", layers)
    if len(numbers) != num_layers:
        raise RouteError(
            f"layers={numbers} names {len(numbers)} layers, and expert_ids has {num_layers}: "
            "expected one number for each place on the layer axis"
        )
    return numbers


def axis_places(
    layers: Layers,
    axis_size: int,
    wanted: tuple[int, ...],
    moe_layers: tuple[int, ...] | None,
    num_layers: int | None,
) -> list[int]:
    """Where wanted layers are on the axis of `Routes.layers`: places from 0, in their order.
    `moe_layers` are all of the model, `num_layers` is of its decoder, if known. A RouteError for a
    layer that is no MoE layer, that is not on the axis, or is not known there for sure."""
    if moe_layers is not None and (dense := sorted(set(wanted) - set(moe_layers))):
        raise RouteError(f"layers {dense} are no MoE layers: this model has {list(moe_layers)}")
    axis = _axis_numbers(layers, axis_size, wanted, moe_layers, num_layers)
    place_of = {number: place for place, number in enumerate(axis)}
    lacking = [number for number in wanted if number not in place_of]
    if lacking:
        raise RouteError(
            f"no routes for layers {lacking}: layers={layers!r} means {list(axis)}; "
            "capture those layers, too, or say which ones the axis holds"
        )
    return [place_of[number] for number in wanted]


def _axis_numbers(
    layers: Layers,
    axis_size: int,
    wanted: tuple[int, ...],
    moe_layers: tuple[int, ...] | None,
    num_layers: int | None,
) -> tuple[int, ...]:
    """The number of the layer at each place of the axis."""
    if isinstance(layers, tuple):
        return layers
    if layers == "all":
        if num_layers not in (None, axis_size):
            raise RouteError(
                f"{axis_size} layers of routes with layers='all', and the model has {num_layers}: "
                "say which layers they are, layers=(number, ...)"
            )
        return tuple(range(1, axis_size + 1))
    if moe_layers is None and num_layers == axis_size:
        moe_layers = tuple(range(1, axis_size + 1))
    elif moe_layers is None and len(wanted) == axis_size:
        moe_layers = tuple(sorted(wanted))
    if moe_layers is None:
        raise RouteError(
            f"{axis_size} layers of routes with layers='moe', and {len(wanted)} layers asked for: "
            "which MoE layers the model has decides where they are; pass moe_layers="
        )
    if len(moe_layers) != axis_size:
        raise RouteError(
            f"{axis_size} layers of routes with layers='moe', and the model has {len(moe_layers)} "
            f"MoE layers, {list(moe_layers)}: say layers='all' if dense layers are among them, or "
            "which they are, layers=(number, ...)"
        )
    return moe_layers
