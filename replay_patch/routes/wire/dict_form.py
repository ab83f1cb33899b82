"""Routes as a JSON-safe dict and as bytes. A decoder trusts nothing that it is given.

Both hold the same arrays, compact and little-endian; nothing is pickled. The dict:

    format        "replay-patch/routes"
    version       1
    byte_order    "little"
    dtype         "uint8", "int16" or "int32", as `num_experts` has it
    shape         [tokens, layers, topk]
    num_experts   of the model
    start         tokens of the trajectory before the first row
    layers        "moe", "all" or layer numbers
    empty_layers  places on the layer axis that hold nothing
    expert_ids    base64
    captured      None if all tokens are, else base64 of one bit for each token, lowest bit first
    notes         None if there are none, else base64 of one byte for each token
    crc32         of the bytes form up to this number, and of what follows there

The bytes: `HEADER`, then layer numbers and empty layers as uint32, captured, notes, expert_ids.

What a message costs to decode is bounded by its own length: every size is compared with the bytes
that are really there before anything is allocated.
"""

from typing import Any

import numpy as np

from replay_patch.errors import WireError
from replay_patch.routes.expert_ids import Parts
from replay_patch.routes.wire import base64_text
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
    decoded,
    empty_layers,
    head,
    id_dtype,
    layer_axis,
    message_of,
    number,
    refuse,
    shown,
)

FORMAT = "replay-patch/routes"
_KEYS = {"format", "version", "byte_order", "dtype", "shape", "num_experts", "start", "layers"}
_KEYS |= {"empty_layers", "expert_ids", "captured", "notes", "crc32"}


def to_dict(routes: Parts) -> dict[str, Any]:
    """See `Routes.to_wire`."""
    message = message_of(routes)
    return {
        "format": FORMAT,
        "version": VERSION,
        "byte_order": "little",
        "dtype": id_dtype(message.num_experts).name,
        "shape": [message.tokens, message.num_layers, message.topk],
        "num_experts": message.num_experts,
        "start": message.start,
        "layers": list(message.layers) if isinstance(message.layers, tuple) else message.layers,
        "empty_layers": list(message.empty),
        "expert_ids": base64_text.encode(message.ids),
        "captured": None if message.captured is None else base64_text.encode(message.captured),
        "notes": None if message.notes is None else base64_text.encode(message.notes),
        "crc32": message.crc,
    }


def to_bytes(routes: Parts) -> bytes:
    """See `Routes.to_bytes`."""
    message = message_of(routes)
    return b"".join([head(message), CRC.pack(message.crc), *bodies(message)])


def from_dict(given: Any) -> Parts:
    """See `Routes.from_wire`."""
    if not isinstance(given, dict):
        refuse("the message", given, "a dict, as to_wire() gives it")
    if set(given) != _KEYS:
        raise WireError(
            f"the message lacks {sorted(_KEYS - set(given))} and has unknown "
            f"{shown([key for key in given if key not in _KEYS])}: expected the keys of to_wire()"
        )
    for key, expected in (("format", FORMAT), ("version", VERSION), ("byte_order", "little")):
        if type(given[key]) is not type(expected) or given[key] != expected:
            refuse(key, given[key], repr(expected))
    shape = given["shape"]
    if type(shape) not in (list, tuple) or len(shape) != 3:
        refuse("shape", shape, "[tokens, layers, topk]")
    num_experts = number("num_experts", given["num_experts"], 1)
    dtype = id_dtype(num_experts)
    if type(given["dtype"]) is not str or given["dtype"] != dtype.name:
        refuse("dtype", given["dtype"], f"{dtype.name!r} for {num_experts} experts")
    tokens = number("tokens", shape[0], 0)
    num_layers = number("layers", shape[1], 0)
    topk = number("topk", shape[2], 1, num_experts)
    captured, notes = given["captured"], given["notes"]
    message = Message(
        tokens,
        num_layers,
        topk,
        num_experts,
        number("start", given["start"], 0),
        layer_axis(given["layers"], num_layers),
        empty_layers(given["empty_layers"], given["layers"], num_layers),
        _unbase64("expert_ids", given["expert_ids"], tokens * num_layers * topk * dtype.itemsize),
        None if captured is None else _unbase64("captured", captured, bytes_of_bits(tokens)),
        None if notes is None else _unbase64("notes", notes, tokens),
        number("crc32", given["crc32"], 0, 2**32 - 1),
    )
    return decoded(message)


def from_bytes(given: Any) -> Parts:
    """See `Routes.from_bytes`."""
    if not isinstance(given, bytes | bytearray | memoryview):
        refuse("the message", given, "bytes")
    try:
        data = memoryview(given).cast("B")
    except (TypeError, ValueError):  # not contiguous; released
        refuse("the message", given, "contiguous bytes")
    if len(data) < HEADER.size:
        refuse("the message", f"{len(data)} bytes", f"at least the {HEADER.size} of the header")
    magic, version, flags, itemsize, *numbers, crc = HEADER.unpack_from(data)
    if magic != MAGIC:
        refuse("the magic", magic, repr(MAGIC))
    if version != VERSION:
        refuse("version", version, str(VERSION))
    if flags & ~(CAPTURED | NOTES | ALL | NUMBERS) or (flags & ALL and flags & NUMBERS):
        refuse("flags", flags, "those of version 1")
    num_experts = number("num_experts", numbers[0], 1)
    dtype = id_dtype(num_experts)
    if itemsize != dtype.itemsize:
        refuse("the size of an id", itemsize, f"{dtype.itemsize} for {num_experts} experts")
    num_layers = number("layers", numbers[1], 0)
    topk = number("topk", numbers[2], 1, num_experts)
    num_empty = number("empty layers", numbers[3], 0, num_layers)
    tokens = number("tokens", numbers[4], 0)
    start = number("start", numbers[5], 0)
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
    bodies, at = [], HEADER.size
    for size in sizes:
        bodies.append(data[at : at + size])
        at += size
    layers: Any = "all" if flags & ALL else "moe"
    if flags & NUMBERS:
        layers = np.frombuffer(bodies[0], "<u4").tolist()
    message = Message(
        tokens,
        num_layers,
        topk,
        num_experts,
        start,
        layer_axis(layers, num_layers),
        empty_layers(np.frombuffer(bodies[1], "<u4").tolist(), layers, num_layers),
        bodies[4],
        bodies[2] if flags & CAPTURED else None,
        bodies[3] if flags & NOTES else None,
        crc,
    )
    return decoded(message)


def _unbase64(what: str, given: Any, size: int) -> bytes:
    """The bytes of a base64 text, which are `size`."""
    if type(given) is not str:
        refuse(what, given, "base64 text")
    if len(given) != (size + 2) // 3 * 4:
        refuse(what, f"{len(given)} characters", f"{(size + 2) // 3 * 4}, base64 of {size} bytes")
    try:
        data = base64_text.decode(given)
    except ValueError:  # another alphabet; not ASCII
        refuse(what, given, "base64 text")
    if len(data) != size:
        refuse(what, f"{len(data)} bytes", f"{size}")
    return data
