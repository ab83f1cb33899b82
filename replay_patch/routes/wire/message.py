"""What a message of routes says, whichever form it has, and the checks of all that it says."""

import itertools
import reprlib
import struct
import zlib
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from replay_patch.errors import RouteError, WireError
from replay_patch.routes.expert_ids import CAUSES, MISMATCH, Layers, Parts, check_stored, ids_dtype

VERSION = 1
MAGIC = b"\x89RPR\r\n\x1a\n"  # as PNG's: a transfer as text, or cut to 7 bits, breaks it

# magic, version, flags, bytes of an id, num_experts, layers, topk, empty layers, tokens, start, crc
HEADER = struct.Struct("<8sHBBIIIIQQI")
CRC = struct.Struct("<I")
CAPTURED, NOTES, ALL, NUMBERS = 1, 2, 4, 8  # flags

_MOST = {  # so that no product overflows, and every number is exact in every JSON library
    "tokens": 2**31 - 1,
    "layers": 2**16 - 1,
    "num_experts": 2**31,
    "start": 2**53 - 1,
    "a layer number": 2**31 - 1,
}


class Message(NamedTuple):
    """What both forms say."""

    tokens: int
    num_layers: int
    topk: int
    num_experts: int
    start: int
    layers: Layers
    empty: tuple[int, ...]
    ids: Any  # bytes or what has a buffer
    captured: Any
    notes: Any
    crc: int


def message_of(routes: Parts) -> Message:
    tokens, num_layers, topk = routes.expert_ids.shape
    number("tokens", tokens, 0)
    number("layers", num_layers, 0)
    number("start", routes.start, 0)
    if isinstance(routes.layers, tuple):
        layer_axis(list(routes.layers), num_layers)
    dtype = id_dtype(routes.num_experts)
    captured = None
    # Without layers there are no ids, and nothing but the bits shows that the tokens are there.
    if not num_layers or not routes.captured.all():
        captured = np.packbits(routes.captured.numpy(), bitorder="little").tobytes()
    message = Message(
        tokens,
        num_layers,
        topk,
        routes.num_experts,
        routes.start,
        routes.layers,
        routes.empty_layers,
        routes.expert_ids.contiguous().numpy().astype(dtype, copy=False).reshape(-1),
        captured,
        None if routes.notes is None else routes.notes.numpy().tobytes(),
        0,
    )
    return message._replace(crc=checksum(message))


def decoded(message: Message) -> Parts:
    """The routes of a message whose sizes are right."""
    tokens, num_layers = message.tokens, message.num_layers
    captured = _captured(message)
    notes = None
    if message.notes is not None:
        notes = torch.from_numpy(np.frombuffer(bytearray(message.notes), np.uint8))
        if tokens and (
            int(notes.max()) >= len(CAUSES)
            or bool(((notes != 0) & (captured != (notes == MISMATCH))).any())
        ):
            raise WireError(f"notes: expected causes of holes, or {MISMATCH} at captured tokens")
    dtype = id_dtype(message.num_experts)
    array = np.frombuffer(bytearray(message.ids), dtype).astype(dtype.newbyteorder("="), copy=False)
    ids = torch.from_numpy(array).view(tokens, num_layers, message.topk)
    if not captured.all():
        ids[~captured] = 0  # what a hole's row holds is never read
    if message.empty and bool(ids[:, list(message.empty)].any()):
        raise WireError(f"places {list(message.empty)} of the layer axis hold ids: expected zeros")
    try:
        check_stored(ids, captured, message.num_experts, message.empty, message.layers)
    except RouteError as error:
        raise WireError(str(error)) from None
    crc = checksum(message._replace(ids=array.astype(dtype, copy=False)))
    if crc != message.crc:  # the shape's numbers were swapped, say, and all ids are still right
        raise WireError(f"crc32 is {message.crc}: expected {crc}; something was changed on the way")
    return Parts(
        ids,
        captured,
        message.num_experts,
        message.start,
        message.layers,
        message.empty,
        notes if notes is not None and bool(notes.any()) else None,
    )


def _captured(message: Message) -> Tensor:
    if message.captured is None:
        if not message.num_layers:
            raise WireError("captured is None, and there are no layers: expected one bit per token")
        return torch.ones(message.tokens, dtype=torch.bool)
    bits = np.frombuffer(message.captured, np.uint8)
    if message.tokens % 8 and bits[-1] >> message.tokens % 8:
        raise WireError(f"captured: expected zeros after the bits of {message.tokens} tokens")
    flags = np.unpackbits(bits, count=message.tokens, bitorder="little")
    return torch.from_numpy(flags.view(np.bool_))


def head(message: Message) -> bytes:
    flags = CAPTURED if message.captured is not None else 0
    flags |= NOTES if message.notes is not None else 0
    flags |= NUMBERS if isinstance(message.layers, tuple) else 0
    flags |= ALL if message.layers == "all" else 0
    head = HEADER.pack(
        MAGIC,
        VERSION,
        flags,
        id_dtype(message.num_experts).itemsize,
        message.num_experts,
        message.num_layers,
        message.topk,
        len(message.empty),
        message.tokens,
        message.start,
        0,
    )
    return head[: -CRC.size]


def bodies(message: Message) -> list[Any]:
    numbers = message.layers if isinstance(message.layers, tuple) else ()
    return [
        np.asarray(numbers, "<u4").tobytes(),
        np.asarray(message.empty, "<u4").tobytes(),
        message.captured or b"",
        message.notes or b"",
        message.ids,
    ]


def checksum(message: Message) -> int:
    crc = zlib.crc32(head(message))
    for body in bodies(message):
        crc = zlib.crc32(body, crc)
    return crc


def id_dtype(num_experts: int) -> Any:
    """Of the ids, little-endian."""
    return np.dtype(str(ids_dtype(num_experts)).removeprefix("torch.")).newbyteorder("<")


def bytes_of_bits(count: int) -> int:
    return (count + 7) // 8


def layer_axis(given: Any, num_layers: int) -> Layers:
    if type(given) is str and given in ("moe", "all"):
        return given
    if type(given) not in (list, tuple) or len(given) != num_layers:
        refuse("layers", given, f"'moe', 'all' or {num_layers} layer numbers")
    numbers = tuple(number("a layer number", layer, 1) for layer in given)
    if len(set(numbers)) != len(numbers):
        refuse("layers", given, "distinct numbers")
    return numbers


def empty_layers(given: Any, layers: Any, num_layers: int) -> tuple[int, ...]:
    if type(given) not in (list, tuple) or len(given) >= max(1, num_layers):
        refuse("empty_layers", given, f"fewer places than the {num_layers} layers")
    places = tuple(number("empty_layers", place, 0, num_layers - 1) for place in given)
    if places and layers != "all":
        refuse("empty_layers", given, "none, as layers is not 'all'")
    if any(one >= other for one, other in itertools.pairwise(places)):
        refuse("empty_layers", given, "increasing places")
    return places


def number(what: str, given: Any, least: int, most: int | None = None) -> int:
    most = _MOST[what] if most is None else most
    if type(given) is not int or not least <= given <= most:  # a bool is no int here
        refuse(what, given, f"an integer from {least} to {most}")
    return given


def refuse(what: str, found: Any, expected: str) -> NoReturn:
    raise WireError(f"{what} is {shown(found)}: expected {expected}")


def shown(value: Any) -> str:
    """Short, whatever it is."""
    if isinstance(value, str) and value.endswith((" bytes", " characters")):
        return value
    if (
        isinstance(value, bytes | bytearray | memoryview) and len(value) > 16
    ):  # reprlib has no limit
        return f"a {type(value).__name__} of length {len(value)}"
    try:
        return reprlib.repr(value)
    except ValueError:  # an int of too many digits
        return f"a {type(value).__name__}"
