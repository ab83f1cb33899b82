"""The bytes form of a message of routes: a header of fixed size, and arrays one after the other.

`message.HEADER`, then layer numbers and empty layers as uint32, captured, notes, expert_ids. The
checksum is of the header up to it, and of what follows. All numbers are little-endian.
"""

from typing import Any

import numpy as np

from replay_patch.routes.checked_routes import CheckedRoutes
from replay_patch.routes.wire.field_checks import (
    checked_empty_layers,
    checked_layer_axis,
    checked_number,
    refuse,
)
from replay_patch.routes.wire.message import (
    ALL,
    CAPTURED,
    CRC,
    HEADER,
    MAGIC,
    NOTES,
    NUMBERS,
    VERSION,
    Message,
    bodies,
    bytes_of_bits,
    from_message,
    id_dtype,
    packed_header,
    to_message,
)


def to_bytes(routes: CheckedRoutes) -> bytes:
    """Routes as a header and arrays.

    Raises:
        WireError: more tokens or layers than a message may have.
    """
    message = to_message(routes)
    return b"".join([packed_header(message), CRC.pack(message.crc), *bodies(message)])


def from_bytes(message_bytes: Any) -> CheckedRoutes:
    """The routes of bytes that came from elsewhere: bytes, bytearray or memoryview.

    Raises:
        WireError: it is not what `to_bytes` gave.
    """
    if not isinstance(message_bytes, bytes | bytearray | memoryview):
        refuse("the message", message_bytes, "bytes")
    try:
        data = memoryview(message_bytes).cast("B")
    except (TypeError, ValueError):  # not contiguous; released
        refuse("the message", message_bytes, "contiguous bytes")
    if len(data) < HEADER.size:
        refuse("the message", f"{len(data)} bytes", f"at least the {HEADER.size} of the header")
    magic, version, flags, itemsize, *numbers, crc = HEADER.unpack_from(data)
    if magic != MAGIC:
        refuse("the magic", magic, repr(MAGIC))
    if version != VERSION:
        refuse("version", version, str(VERSION))
    if flags & ~(CAPTURED | NOTES | ALL | NUMBERS) or (flags & ALL and flags & NUMBERS):
        refuse("flags", flags, "those of version 1")
    num_experts = checked_number("num_experts", numbers[0], 1)
    dtype = id_dtype(num_experts)
    if itemsize != dtype.itemsize:
        refuse("the size of an id", itemsize, f"{dtype.itemsize} for {num_experts} experts")
    num_layers = checked_number("layers", numbers[1], 0)
    topk = checked_number("topk", numbers[2], 1, num_experts)
    num_empty = checked_number("empty layers", numbers[3], 0, num_layers)
    tokens = checked_number("tokens", numbers[4], 0)
    start = checked_number("start", numbers[5], 0)
    sizes = (
        4 * num_layers if flags & NUMBERS else 0,
        4 * num_empty,
        bytes_of_bits(tokens) if flags & CAPTURED else 0,
        tokens if flags & NOTES else 0,
        tokens * num_layers * topk * dtype.itemsize,
    )
    if len(data) != HEADER.size + sum(sizes):
        refuse(
            "the message",
            f"{len(data)} bytes",
            f"{HEADER.size + sum(sizes)} for {[tokens, num_layers, topk]} {dtype.name} ids",
        )
    arrays, offset = [], HEADER.size
    for size in sizes:
        arrays.append(data[offset : offset + size])
        offset += size
    layers: Any = "all" if flags & ALL else "moe"
    if flags & NUMBERS:
        layers = np.frombuffer(arrays[0], "<u4").tolist()
    message = Message(
        tokens,
        num_layers,
        topk,
        num_experts,
        start,
        checked_layer_axis(layers, num_layers),
        checked_empty_layers(np.frombuffer(arrays[1], "<u4").tolist(), layers, num_layers),
        arrays[4],
        arrays[2] if flags & CAPTURED else None,
        arrays[3] if flags & NOTES else None,
        crc,
    )
    return from_message(message)
