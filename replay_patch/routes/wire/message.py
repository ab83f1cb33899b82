"""A message of routes, as the dict form and the bytes form both have it; and its bytes form.

The bytes form is a header of fixed size, `HEADER`, and arrays one after the other: layer numbers
and empty layers as uint32, captured, notes, expert_ids. The checksum is of the header up to it, and
of what follows. All numbers are little-endian. T tokens, L layers, K top-k.
"""

import itertools
import struct
import zlib
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from replay_patch.errors import RouteError, WireError
from replay_patch.routes import expert_ids
from replay_patch.routes.expert_ids import CAUSES, MISMATCH, CheckedRoutes
from replay_patch.routes.layer_axis import Layers
from replay_patch.routes.wire import field_checks as checks

VERSION = 1
MAGIC = b"\x89RPR\r\n\x1a\n"  # as PNG's: a transfer as text, or cut to 7 bits, breaks it

# magic, version, flags, bytes of an id, num_experts, layers, topk, empty layers, tokens, start, crc
HEADER = struct.Struct("<8sHBBIIIIQQI")
CRC = struct.Struct("<I")
CAPTURED, NOTES, ALL, NUMBERS = 1, 2, 4, 8  # flags


class Message(NamedTuple):
    """The fields of a message, of sizes that fit each other; arrays as bytes or what has a buffer.
    `ids` are [T, L, K] in the dtype of `id_dtype`, `captured` one bit for each token, lowest bit
    first, and `notes` one byte for each; None: all tokens are captured, and no notes."""

    tokens: int
    num_layers: int
    topk: int
    num_experts: int
    start: int
    layers: Layers
    empty_layers: tuple[int, ...]
    ids: Any
    captured: Any
    notes: Any
    crc: int


def to_bytes(routes: CheckedRoutes) -> bytes:
    """Routes as a header and arrays; a WireError if they have more tokens or layers than fit."""
    message = to_message(routes)
    return b"".join([packed_header(message), CRC.pack(message.crc), *bodies(message)])


def from_bytes(message_bytes: Any) -> CheckedRoutes:
    """The routes of bytes, a bytearray or a memoryview; a WireError unless `to_bytes` gave them."""
    if not isinstance(message_bytes, bytes | bytearray | memoryview):
        checks.refuse("the message", message_bytes, "bytes")
    try:
        data = memoryview(message_bytes).cast("B")
    except (TypeError, ValueError):  # not contiguous; released
        checks.refuse("the message", message_bytes, "contiguous bytes")
    if len(data) < HEADER.size:
        size = f"{len(data)} bytes"
        checks.refuse("the message", size, f"at least the {HEADER.size} of the header")
    magic, version, flags, itemsize, *numbers, crc = HEADER.unpack_from(data)
    if magic != MAGIC:
        checks.refuse("the magic", magic, repr(MAGIC))
    if version != VERSION:
        checks.refuse("version", version, str(VERSION))
    if flags & ~(CAPTURED | NOTES | ALL | NUMBERS) or (flags & ALL and flags & NUMBERS):
        checks.refuse("flags", flags, "those of version 1")
    num_experts = checks.number("num_experts", numbers[0], 1)
    dtype = id_dtype(num_experts)
    if itemsize != dtype.itemsize:
        checks.refuse("the size of an id", itemsize, f"{dtype.itemsize} for {num_experts} experts")
    num_layers = checks.number("layers", numbers[1], 0)
    topk = checks.number("topk", numbers[2], 1, num_experts)
    num_empty = checks.number("empty layers", numbers[3], 0, num_layers)
    tokens = checks.number("tokens", numbers[4], 0)
    start = checks.number("start", numbers[5], 0)
    sizes = (
        4 * num_layers if flags & NUMBERS else 0,
        4 * num_empty,
        bytes_of_bits(tokens) if flags & CAPTURED else 0,
        tokens if flags & NOTES else 0,
        tokens * num_layers * topk * dtype.itemsize,
    )
    if len(data) != HEADER.size + sum(sizes):
        ids = f"{[tokens, num_layers, topk]} {dtype.name} ids"
        checks.refuse("the message", f"{len(data)} bytes", f"{HEADER.size + sum(sizes)} for {ids}")
    ends = itertools.accumulate(sizes, initial=HEADER.size)
    arrays = [data[begin:end] for begin, end in itertools.pairwise(ends)]
    layers: Any = "all" if flags & ALL else "moe"
    if flags & NUMBERS:
        layers = np.frombuffer(arrays[0], "<u4").tolist()
    axis = checks.layer_axis(layers, num_layers)
    empty = checks.empty_layers(np.frombuffer(arrays[1], "<u4").tolist(), layers, num_layers)
    captured = arrays[2] if flags & CAPTURED else None
    notes = arrays[3] if flags & NOTES else None
    shape = tokens, num_layers, topk
    return from_message(
        Message(*shape, num_experts, start, axis, empty, arrays[4], captured, notes, crc)
    )


def to_message(routes: CheckedRoutes) -> Message:
    """The message of some routes; a WireError if they have more tokens or layers than fit."""
    tokens, num_layers, topk = routes.expert_ids.shape
    checks.number("tokens", tokens, 0)
    checks.number("layers", num_layers, 0)
    checks.number("start", routes.start, 0)
    if isinstance(routes.layers, tuple):
        checks.layer_axis(list(routes.layers), num_layers)
    dtype = id_dtype(routes.num_experts)
    captured = None
    # Without layers there are no ids, and nothing but the bits shows that the tokens are there.
    if not num_layers or not routes.captured.all():
        captured = np.packbits(routes.captured.numpy(), bitorder="little").tobytes()
    ids = routes.expert_ids.contiguous().numpy().astype(dtype, copy=False).reshape(-1)
    notes = None if routes.notes is None else routes.notes.numpy().tobytes()
    axis = routes.start, routes.layers, routes.empty_layers
    shape = tokens, num_layers, topk
    message = Message(*shape, routes.num_experts, *axis, ids, captured, notes, crc=0)
    return message._replace(crc=checksum(message))


def from_message(message: Message) -> CheckedRoutes:
    """The routes of a message; a WireError for ids that no router could have chosen, notes or bits
    that do not fit the tokens, or another checksum."""
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
    empty = list(message.empty_layers)
    if empty and bool(ids[:, empty].any()):
        raise WireError(f"places {empty} of the layer axis hold ids: expected zeros")
    try:
        expert_ids.check_stored_ids(ids, captured, message.num_experts, empty, message.layers)
    except RouteError as error:
        raise WireError(str(error)) from None
    crc = checksum(message._replace(ids=array.astype(dtype, copy=False)))
    if crc != message.crc:  # the shape's numbers were swapped, say, and all ids are still right
        raise WireError(f"crc32 is {message.crc}: expected {crc}; something was changed on the way")
    if notes is not None and not notes.any():
        notes = None
    axis = message.start, message.layers, message.empty_layers
    return CheckedRoutes(ids, captured, message.num_experts, *axis, notes)


def _captured(message: Message) -> Tensor:
    """bool [T]."""
    if message.captured is None:
        if not message.num_layers:
            raise WireError("captured is None, and there are no layers: expected one bit per token")
        return torch.ones(message.tokens, dtype=torch.bool)
    bits = np.frombuffer(message.captured, np.uint8)
    if message.tokens % 8 and bits[-1] >> message.tokens % 8:
        raise WireError(f"captured: expected zeros after the bits of {message.tokens} tokens")
    flags = np.unpackbits(bits, count=message.tokens, bitorder="little")
    return torch.from_numpy(flags.view(np.bool_))


def packed_header(message: Message) -> bytes:
    """`HEADER` without its last field, the checksum."""
    flags = CAPTURED if message.captured is not None else 0
    flags |= NOTES if message.notes is not None else 0
    flags |= NUMBERS if isinstance(message.layers, tuple) else 0
    flags |= ALL if message.layers == "all" else 0
    sizes = message.num_experts, message.num_layers, message.topk, len(message.empty_layers)
    itemsize = id_dtype(message.num_experts).itemsize
    tokens, start = message.tokens, message.start
    header = HEADER.pack(MAGIC, VERSION, flags, itemsize, *sizes, tokens, start, 0)
    return header[: -CRC.size]


def bodies(message: Message) -> list[Any]:
    """What follows the header in the bytes form, in order."""
    numbers = message.layers if isinstance(message.layers, tuple) else ()
    return [
        np.asarray(numbers, "<u4").tobytes(),
        np.asarray(message.empty_layers, "<u4").tobytes(),
        message.captured or b"",
        message.notes or b"",
        message.ids,
    ]


def checksum(message: Message) -> int:
    """crc32 of the bytes form without the checksum itself."""
    crc = zlib.crc32(packed_header(message))
    for body in bodies(message):
        crc = zlib.crc32(body, crc)
    return crc


def id_dtype(num_experts: int) -> Any:
    """The numpy dtype of ids in a message of so many experts, little-endian."""
    return np.dtype(str(expert_ids.ids_dtype(num_experts)).removeprefix("torch.")).newbyteorder("<")


def bytes_of_bits(count: int) -> int:
    """How many bytes hold so many bits."""
    return (count + 7) // 8
