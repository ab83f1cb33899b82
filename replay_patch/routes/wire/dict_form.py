"""The dict form of a message of routes, which is safe for JSON:

format        "replay-patch/routes"
version       1
byte_order    "little"
dtype         "uint8", "int16" or "int32", as follows from `num_experts`
shape         [tokens, layers, topk]
num_experts   of the model
start         tokens of the trajectory before the first row
layers        "moe", "all" or layer numbers
empty_layers  places on the layer axis that hold nothing
expert_ids    base64
captured      None if all tokens are, else base64 of one bit for each token, lowest bit first
notes         None if there are none, else base64 of one byte for each token
crc32         of the bytes form without its own checksum
"""

from typing import Any

from replay_patch.errors import WireError
from replay_patch.routes.expert_ids import CheckedRoutes
from replay_patch.routes.wire import base64_text
from replay_patch.routes.wire import field_checks as checks
from replay_patch.routes.wire import message as messages

FORMAT = "replay-patch/routes"
_KEYS = {"format", "version", "byte_order", "dtype", "shape", "num_experts", "start", "layers"}
_KEYS |= {"empty_layers", "expert_ids", "captured", "notes", "crc32"}


def to_dict(routes: CheckedRoutes) -> dict[str, Any]:
    """Routes as a JSON-safe dict; a WireError if they have more tokens or layers than fit."""
    message = messages.to_message(routes)
    return {
        "format": FORMAT,
        "version": messages.VERSION,
        "byte_order": "little",
        "dtype": messages.id_dtype(message.num_experts).name,
        "shape": [message.tokens, message.num_layers, message.topk],
        "num_experts": message.num_experts,
        "start": message.start,
        "layers": list(message.layers) if isinstance(message.layers, tuple) else message.layers,
        "empty_layers": list(message.empty_layers),
        "expert_ids": base64_text.encode(message.ids),
        "captured": None if message.captured is None else base64_text.encode(message.captured),
        "notes": None if message.notes is None else base64_text.encode(message.notes),
        "crc32": message.crc,
    }


def from_dict(fields: Any) -> CheckedRoutes:
    """The routes of a dict from elsewhere; a WireError unless `to_dict` gave it."""
    if not isinstance(fields, dict):
        checks.refuse("the message", fields, "a dict, as to_wire() gives it")
    if set(fields) != _KEYS:
        raise WireError(
            f"the message lacks {sorted(_KEYS - set(fields))} and has unknown "
            f"{checks.shown([key for key in fields if key not in _KEYS])}: expected the keys of "
            "to_wire()"
        )
    constants = {"format": FORMAT, "version": messages.VERSION, "byte_order": "little"}
    for key, expected in constants.items():
        if type(fields[key]) is not type(expected) or fields[key] != expected:
            checks.refuse(key, fields[key], repr(expected))
    shape = fields["shape"]
    if type(shape) not in (list, tuple) or len(shape) != 3:
        checks.refuse("shape", shape, "[tokens, layers, topk]")
    num_experts = checks.number("num_experts", fields["num_experts"], 1)
    dtype = messages.id_dtype(num_experts)
    if type(fields["dtype"]) is not str or fields["dtype"] != dtype.name:
        checks.refuse("dtype", fields["dtype"], f"{dtype.name!r} for {num_experts} experts")
    tokens = checks.number("tokens", shape[0], 0)
    num_layers = checks.number("layers", shape[1], 0)
    topk = checks.number("topk", shape[2], 1, num_experts)
    captured, notes = fields["captured"], fields["notes"]
    start = checks.number("start", fields["start"], 0)
    axis = checks.layer_axis(fields["layers"], num_layers)
    empty = checks.empty_layers(fields["empty_layers"], fields["layers"], num_layers)
    size = tokens * num_layers * topk * dtype.itemsize
    ids = _unbase64("expert_ids", fields["expert_ids"], size)
    if captured is not None:
        captured = _unbase64("captured", captured, messages.bytes_of_bits(tokens))
    if notes is not None:
        notes = _unbase64("notes", notes, tokens)
    crc = checks.number("crc32", fields["crc32"], 0, 2**32 - 1)
    shape = tokens, num_layers, topk
    return messages.from_message(
        messages.Message(*shape, num_experts, start, axis, empty, ids, captured, notes, crc)
    )


def _unbase64(what: str, text: Any, size: int) -> bytes:
    """The bytes of a base64 text, which are `size`."""
    if type(text) is not str:
        checks.refuse(what, text, "base64 text")
    length = (size + 2) // 3 * 4
    if len(text) != length:
        checks.refuse(what, f"{len(text)} characters", f"{length}, base64 of {size} bytes")
    try:
        data = base64_text.decode(text)
    except ValueError:  # another alphabet; not ASCII
        checks.refuse(what, text, "base64 text")
    if len(data) != size:
        checks.refuse(what, f"{len(data)} bytes", f"{size}")
    return data
