"""A message of routes, which the dict form and the bytes form both say, and its checksum.

T tokens, L layers, K top-k.
"""

import struct
import zlib
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from replay_patch.errors import RouteError, WireError
from replay_patch.routes.checked_routes import CAUSES, MISMATCH, CheckedRoutes
from replay_patch.routes.expert_ids import check_stored_ids, ids_dtype
from replay_patch.routes.layer_axis import Layers
from replay_patch.routes.wire.field_checks import checked_layer_axis, checked_number

VERSION = 1
MAGIC = b"\x89RPR\r\n\x1a\n"  # as PNG's: a transfer as text, or cut to 7 bits, breaks it

# magic, version, flags, bytes of an id, num_experts, layers, topk, empty layers, tokens, start, crc
HEADER = struct.Struct("<8sHBBIIIIQQI")
CRC = struct.Struct("<I")
CAPTURED, NOTES, ALL, NUMBERS = 1, 2, 4, 8  # flags


class Message(NamedTuple):
    """The fields of a message, of sizes that fit each other; arrays as bytes or what has a buffer.

    `ids` are [T, L, K] in the dtype of `id_dtype`, `captured` one bit for each token, lowest bit
    first, and `notes` one byte for each; None: all tokens are captured, and no notes.
    """

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


def to_message(routes: CheckedRoutes) -> Message:
    """The message of some routes.

    Raises:
        WireError: more tokens or layers than a message may have.
    """
    tokens, num_layers, topk = routes.expert_ids.shape
    checked_number("tokens", tokens, 0)
    checked_number("layers", num_layers, 0)
    checked_number("start", routes.start, 0)
    if isinstance(routes.layers, tuple):
        checked_layer_axis(list(routes.layers), num_layers)
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


def from_message(message: Message) -> CheckedRoutes:
    """The routes of a message.

    Raises:
        WireError: ids that no router could have chosen, notes or bits that do not fit the tokens,
            or another checksum.
    """
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
        check_stored_ids(ids, captured, message.num_experts, empty, message.layers)
    except RouteError as error:
        raise WireError(str(error)) from None
    crc = checksum(message._replace(ids=array.astype(dtype, copy=False)))
    if crc != message.crc:  # the shape's numbers were swapped, say, and all ids are still right
        raise WireError(f"crc32 is {message.crc}: expected {crc}; something was changed on the way")
    return CheckedRoutes(
        ids,
        captured,
        message.num_experts,
        message.start,
        message.layers,
        message.empty_layers,
        notes if notes is not None and bool(notes.any()) else None,
    )


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
    header = HEADER.pack(
        MAGIC,
        VERSION,
        flags,
        id_dtype(message.num_experts).itemsize,
        message.num_experts,
        message.num_layers,
        message.topk,
        len(message.empty_layers),
        message.tokens,
        message.start,
        0,
    )
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
    return np.dtype(str(ids_dtype(num_experts)).removeprefix("torch.")).newbyteorder("<")


def bytes_of_bits(count: int) -> int:
    """How many bytes hold so many bits."""
    return (count + 7) // 8
