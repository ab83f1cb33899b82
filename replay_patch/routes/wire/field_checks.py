"""Checks of the fields of a message: types, limits and sizes, before anything is allocated.
Each returns what is right, and raises WireError for anything else."""

import itertools
import reprlib
from typing import Any, NoReturn

from replay_patch.errors import WireError
from replay_patch.routes.layer_axis import Layers

# So that no product overflows, and every number is exact in every JSON library.
_LIMITS = {
    "tokens": 2**31 - 1,
    "layers": 2**16 - 1,
    "num_experts": 2**31,
    "start": 2**53 - 1,
    "a layer number": 2**31 - 1,
}


def layer_axis(layers: Any, num_layers: int) -> Layers:
    """`layers` of a message: "moe", "all" or one distinct number for each layer."""
    if type(layers) is str and layers in ("moe", "all"):
        return layers
    if type(layers) not in (list, tuple) or len(layers) != num_layers:
        refuse("layers", layers, f"'moe', 'all' or {num_layers} layer numbers")
    numbers = tuple(number("a layer number", entry, 1) for entry in layers)
    if len(set(numbers)) != len(numbers):
        refuse("layers", layers, "distinct numbers")
    return numbers


def empty_layers(empty: Any, layers: Any, num_layers: int) -> tuple[int, ...]:
    """`empty_layers` of a message: increasing places on the layer axis, not all of them; none
    unless its `layers` are "all"."""
    if type(empty) not in (list, tuple) or len(empty) >= max(1, num_layers):
        refuse("empty_layers", empty, f"fewer places than the {num_layers} layers")
    places = tuple(number("empty_layers", place, 0, num_layers - 1) for place in empty)
    if places and layers != "all":
        refuse("empty_layers", empty, "none, as layers is not 'all'")
    if any(place >= following for place, following in itertools.pairwise(places)):
        refuse("empty_layers", empty, "increasing places")
    return places


def number(what: str, value: Any, least: int, most: int | None = None) -> int:
    """An int, no bool, from `least` to `most`; None: to the limit of a message for this field."""
    most = _LIMITS[what] if most is None else most
    if type(value) is not int or not least <= value <= most:
        refuse(what, value, f"an integer from {least} to {most}")
    return value


def refuse(what: str, value: Any, expected: str) -> NoReturn:
    """Raise WireError with the name of a field, its value in few characters, and the right one."""
    raise WireError(f"{what} is {shown(value)}: expected {expected}")


def shown(value: Any) -> str:
    """A value in few characters, whatever a stranger sent; a size ("3 bytes") as it is."""
    if isinstance(value, str) and value.endswith((" bytes", " characters")):
        return value
    # reprlib does not shorten these.
    if isinstance(value, bytes | bytearray | memoryview) and len(value) > 16:
        return f"a {type(value).__name__} of length {len(value)}"
    try:
        return reprlib.repr(value)
    except ValueError:  # an int of too many digits
        return f"a {type(value).__name__}"
