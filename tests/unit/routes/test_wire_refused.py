"""Messages that are no routes: every one is a WireError, and none costs more than its length."""

import base64
import contextlib
import json
import math
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replay_patch import Routes, WireError
from replay_patch.routes.wire import message as messages
from replay_patch.routes.wire.dict_form import from_dict

ROUTES = Routes(
    torch.rand(6, 3, 300, generator=torch.Generator().manual_seed(0)).argsort(2)[..., :2],
    300,
    captured=[True, True, False, True, True, True],
    start=2,
    layers=(2, 3, 5),
)
PLAIN = Routes([[[0, 1], [2, 3]], [[4, 5], [6, 7]]], 8)
MESSAGE = ROUTES.to_wire()
BYTES = ROUTES.to_bytes()


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.mark.parametrize(
    "change, text",
    [
        ({"format": "routes"}, "format is 'routes': expected 'replay-patch/routes'"),
        ({"version": 2}, "version is 2: expected 1"),
        ({"version": True}, "version is True"),
        ({"version": 1.0}, "version is 1.0"),
        ({"byte_order": "big"}, "byte_order is 'big': expected 'little'"),
        ({"dtype": "uint8"}, "dtype is 'uint8': expected 'int16' for 300 experts"),
        ({"dtype": "O"}, "dtype is 'O'"),
        ({"dtype": "uint16"}, "dtype is 'uint16'"),
        ({"dtype": None}, "dtype is None"),
        ({"num_experts": 8}, "dtype is 'int16': expected 'uint8'"),
        ({"num_experts": 0}, "num_experts is 0"),
        ({"num_experts": True}, "num_experts is True"),
        ({"num_experts": math.nan}, "num_experts is nan"),
        ({"num_experts": 2**31 + 1}, "num_experts is"),
        ({"num_experts": 290}, "id is out of range|crc32"),
        ({"shape": [6, 3]}, r"shape is \[6, 3\]"),
        ({"shape": "632"}, "shape is '632'"),
        ({"shape": [6, 3, True]}, "topk is True"),
        ({"shape": [6.0, 3, 2]}, "tokens is 6.0"),
        ({"shape": [-6, 3, 2]}, "tokens is -6"),
        ({"shape": [6, 3, 0]}, "topk is 0"),
        ({"shape": [6, 3, 301]}, "topk is 301: expected an integer from 1 to 300"),
        ({"shape": [2**31, 3, 2]}, "tokens is 2147483648"),
        ({"shape": [2**30, 3, 2]}, "expert_ids is 96 characters: expected"),
        ({"shape": [10**5000, 3, 2]}, "tokens is a"),
        ({"shape": [0, 2**70, 2]}, "layers is"),
        ({"shape": [3, 6, 2]}, "layers is .*expected.*6 layer numbers"),
        ({"start": -1}, "start is -1"),
        ({"start": False}, "start is False"),
        ({"start": 3}, "crc32 is .*: expected"),
        ({"start": "2"}, "start is '2'"),
        ({"layers": "dense"}, "layers is 'dense'"),
        ({"layers": [2, 3]}, r"layers is \[2, 3\]: expected 'moe', 'all' or 3 layer numbers"),
        ({"layers": [2, 3, 3]}, "distinct"),
        ({"layers": [2, 3, True]}, "a layer number is True"),
        ({"layers": [0, 2, 3]}, "a layer number is 0"),
        ({"layers": "moe"}, "crc32"),
        ({"layers": None}, "layers is None"),
        ({"empty_layers": [0]}, "expected none, as layers is not 'all'"),
        ({"empty_layers": [0, 1, 2]}, "fewer places than the 3 layers"),
        ({"empty_layers": None}, "empty_layers is None"),
        ({"layers": "all", "empty_layers": [1, 0]}, "increasing places"),
        ({"layers": "all", "empty_layers": [3]}, "empty_layers is 3"),
        ({"layers": "all", "empty_layers": [0]}, r"places \[0\] of the layer axis hold ids"),
        ({"expert_ids": MESSAGE["expert_ids"][:-4]}, "expert_ids is 92 characters: expected 96"),
        ({"expert_ids": "é" * 96}, "expected base64 text"),
        ({"expert_ids": "*" * 96}, "expected base64 text"),
        ({"expert_ids": MESSAGE["expert_ids"].replace("A", "\n", 1)}, "expected base64 text"),
        ({"expert_ids": MESSAGE["expert_ids"][:-1] + "="}, "71 bytes: expected 72"),
        ({"expert_ids": None}, "expert_ids is None: expected base64 text"),
        ({"expert_ids": list(range(96))}, "expected base64 text"),
        ({"expert_ids": b64(b"\x00\x01" * 36)}, "twice in one row"),
        ({"expert_ids": b64(b"\x01\x02\xff\xff" * 18)}, "out of range"),
        ({"expert_ids": b64(b"\x2c\x01\x00\x00" * 18)}, r"is \[300, 0\]: an id is out of range"),
        ({"captured": None}, "twice in one row"),
        ({"captured": ""}, "captured is 0 characters: expected 4"),
        ({"captured": b64(b"\xfb\x00")}, "captured is 2 bytes|captured is .*: expected"),
        ({"captured": b64(b"\xfb")}, "zeros after the bits of 6 tokens"),
        ({"captured": [True] * 6}, "expected base64 text"),
        ({"captured": True}, "expected base64 text"),
        ({"notes": b64(bytes(5))}, "notes is .*expected"),
        ({"notes": b64(b"\x00\x00\x09\x00\x00\x00")}, "expected causes of holes"),
        ({"notes": b64(b"\x01\x00\x00\x00\x00\x00")}, "expected causes of holes"),
        ({"notes": b64(b"\x00\x00\x05\x00\x00\x00")}, "expected causes of holes"),
        ({"notes": b64(b"\x00\x00\x01\x00\x00\x00")}, "crc32"),
        ({"crc32": 0}, "crc32 is 0"),
        ({"crc32": -1}, "crc32 is -1"),
        ({"crc32": None}, "crc32 is None"),
        ({"more": 1}, "lacks .* and has unknown .*more"),
        ({1: 1}, "unknown"),
    ],
)
def test_a_changed_dict_is_refused(change: Any, text: str) -> None:
    with pytest.raises(WireError, match=text):
        Routes.from_wire(MESSAGE | change)


@pytest.mark.parametrize("key", MESSAGE)
def test_a_dict_that_lacks_a_key_is_refused(key: str) -> None:
    with pytest.raises(WireError, match=f"lacks .*{key}"):
        Routes.from_wire({k: v for k, v in MESSAGE.items() if k != key})


@pytest.mark.parametrize("given", [None, [], "text", b"", 1, math.nan, json.dumps(MESSAGE)])
def test_what_is_no_dict_is_refused(given: Any) -> None:
    with pytest.raises(WireError, match="the message is"):
        Routes.from_wire(given)


def test_numbers_of_the_shape_that_are_swapped_are_found() -> None:
    message = PLAIN.to_wire()
    assert message["shape"] == [2, 2, 2]
    one = Routes([[[0, 1], [2, 3]]] * 3, 8).to_wire()
    one["shape"] = [2, 3, 2]  # every row is right all the same

    with pytest.raises(WireError, match="crc32"):
        Routes.from_wire(one)


def test_ids_in_the_other_byte_order_are_refused() -> None:
    ids = base64.b64decode(MESSAGE["expert_ids"])
    swapped = b"".join(ids[i : i + 2][::-1] for i in range(0, len(ids), 2))

    with pytest.raises(WireError, match="out of range"):
        Routes.from_wire(MESSAGE | {"expert_ids": b64(swapped)})


@pytest.mark.parametrize(
    "given, text",
    [
        ("text", "the message is 'text': expected bytes"),
        (None, "the message is None"),
        (b"", "0 bytes: expected at least the 48 of the header"),
        (BYTES[:47], "47 bytes"),
        (BYTES[:-1], f"{len(BYTES) - 1} bytes: expected {len(BYTES)}"),
        (BYTES + b"\0", f"{len(BYTES) + 1} bytes: expected {len(BYTES)}"),
        (b"\x80\x05" + BYTES[2:], "the magic is"),  # a pickle
        (BYTES[:8] + b"\x02" + BYTES[9:], "version is 2"),
        (BYTES[:10] + b"\xff" + BYTES[11:], "flags is 255"),
        (BYTES[:11] + b"\x01" + BYTES[12:], "the size of an id is 1: expected 2"),
        (memoryview(BYTES)[::2], "contiguous"),
    ],
)
def test_bytes_that_are_no_message_are_refused(given: Any, text: str) -> None:
    with pytest.raises(WireError, match=text):
        Routes.from_bytes(given)


def test_every_changed_byte_is_found() -> None:
    holes = range(len(BYTES) - 72 + 2 * 12, len(BYTES) - 72 + 3 * 12)  # which nobody reads
    for place in range(len(BYTES)):
        if place not in holes:
            with pytest.raises(WireError):
                Routes.from_bytes(BYTES[:place] + bytes([BYTES[place] ^ 1]) + BYTES[place + 1 :])


def test_every_cut_is_found() -> None:
    for size in range(len(BYTES)):
        with pytest.raises(WireError):
            Routes.from_bytes(BYTES[:size])


# --- nothing else is raised, and little is allocated ---------------------------------------------


def decodes_or_refuses(decode: Callable[[Any], Routes], given: Any, size: int) -> None:
    tracemalloc.start()
    with contextlib.suppress(WireError):
        assert decode(given).num_tokens <= 8 * size
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200_000 + 50 * size


NUMBERS = st.sampled_from([0, 1, 2, 3, 255, 256, 300, 2**16, 2**31, 2**32, 2**63, 2**64, -1])
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(sorted(MESSAGE)), JSON | st.lists(NUMBERS, max_size=3), min_size=1
    )
)
def test_no_changed_dict_does_harm(changes: dict[str, Any]) -> None:
    decodes_or_refuses(Routes.from_wire, MESSAGE | changes, 1000)


@settings(max_examples=100, deadline=None)
@given(JSON)
def test_no_json_does_harm(given_: Any) -> None:
    decodes_or_refuses(Routes.from_wire, given_, 1000)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_changed_bytes_do_harm(data: Any) -> None:
    message = bytearray(BYTES)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(message) - 1))
        piece = data.draw(st.binary(max_size=8))
        message[place : place + len(piece)] = piece
    if data.draw(st.booleans()) and len(message) >= 48:  # one that can compute a checksum
        message[44:48] = messages.CRC.pack(zlib.crc32(message[48:], zlib.crc32(message[:44])))

    decodes_or_refuses(Routes.from_bytes, message, len(message))


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_no_bytes_do_harm(given_: bytes) -> None:
    decodes_or_refuses(Routes.from_bytes, given_, len(given_))
    decodes_or_refuses(Routes.from_bytes, BYTES[:12] + given_, len(given_))


@pytest.mark.parametrize("given_", [bytes(10**6), "a" * 10**6, [0] * 10**6, {"a": bytes(10**6)}])
def test_errors_are_short_whatever_was_given(given_: Any) -> None:
    for message in (given_, MESSAGE | {"shape": given_}, MESSAGE | {"expert_ids": given_}):
        decodes_or_refuses(Routes.from_wire, message, 10**6)
        with pytest.raises(WireError) as caught:
            Routes.from_wire(message)
        assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "tokens, layers, topk", [(2**31 - 1, 0, 1), (0, 65535, 300), (2**31 - 1, 65535, 300)]
)
def test_huge_shapes_cost_nothing(tokens: int, layers: int, topk: int) -> None:
    message = messages.Message(tokens, layers, topk, 300, 0, "moe", (), b"", None, None, 0)
    data = messages.packed_header(message) + messages.CRC.pack(messages.checksum(message))

    decodes_or_refuses(Routes.from_bytes, data, len(data))
    wire = MESSAGE | {"shape": [tokens, layers, topk], "layers": "moe", "expert_ids": ""}
    decodes_or_refuses(Routes.from_wire, wire | {"captured": None}, 1000)
    with pytest.raises(
        WireError, match=r"captured is None, and there are no layers|characters|crc32"
    ):
        from_dict(wire | {"captured": None})
