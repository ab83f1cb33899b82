"""Routes as a JSON-safe dict and as bytes: nothing is lost."""

import base64
import json
from typing import Any

import pytest
import torch
from helpers import interpreters
from hypothesis import given, settings
from hypothesis import strategies as st
from programs.routes import without_megatron

from replay_patch import Routes, WireError
from replay_patch.routes.wire import base64_text


def routes(
    tokens: int = 5,
    layers: int = 3,
    topk: int = 2,
    num_experts: int = 8,
    axis: Any = "moe",
    holes: tuple[int, ...] = (),
    start: int = 0,
) -> Routes:
    chance = torch.Generator().manual_seed(tokens * 1000 + layers * 100 + num_experts % 97)
    scores = torch.rand(tokens, layers, min(num_experts, 512), generator=chance)
    ids = scores.argsort(2)[..., :topk] + max(0, num_experts - 512)
    captured = torch.ones(tokens, dtype=torch.bool)
    captured[list(holes)] = False
    return Routes(ids, num_experts, captured=captured, start=start, layers=axis)


def assert_same(one: Routes, other: Routes) -> None:
    assert one.expert_ids.dtype is other.expert_ids.dtype
    assert torch.equal(one.expert_ids, other.expert_ids)
    assert torch.equal(one.captured, other.captured)
    for name in ("num_experts", "start", "layers", "empty_layers", "rejected"):
        assert getattr(one, name) == getattr(other, name)
    assert (one.notes is None) == (other.notes is None)
    assert other.expert_ids.is_contiguous()


CASES = {
    "uint8": routes(num_experts=256),
    "int16": routes(num_experts=257),
    "int16, all": routes(num_experts=32768, axis="all"),
    "int32": routes(num_experts=32769),
    "the most experts": routes(num_experts=2**31),
    "holes": routes(tokens=9, holes=(0, 8)),
    "nothing but holes": routes(holes=(0, 1, 2, 3, 4)),
    "eight tokens": routes(tokens=8, holes=(7,)),
    "start": routes(start=2**40),
    "layer numbers": routes(axis=(7, 2, 30)),
    "no tokens": routes(tokens=0),
    "no layers": routes(layers=0, axis=()),
    "no layers, holes": routes(layers=0, axis=(), holes=(1,)),
    "neither": routes(tokens=0, layers=0),
    "one expert": routes(topk=1, num_experts=1),
    "many columns": routes(topk=20, num_experts=64),
    "dense layers": Routes([[[0, 0], [1, 2]], [[0, 0], [3, 4]]], 8, layers="all"),
    "dense layers, top-1": Routes([[[-1], [0]], [[-1], [0]]], 8, layers="all"),
    "rejected": Routes([[[0, 9]], [[1, 1]], [[0, 1]], [[-1, 1]]], 8, on_invalid="hole"),
    "mismatch": routes().append(routes(layers=3, num_experts=8, start=4), "count"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_round_trip_loses_nothing(case: str) -> None:  # 86
    before = CASES[case]

    assert_same(before, Routes.from_wire(before.to_wire()))
    assert_same(before, Routes.from_wire(json.loads(json.dumps(before.to_wire()))))
    assert_same(before, Routes.from_bytes(before.to_bytes()))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_routes_come_back(data: Any) -> None:
    tokens, layers = data.draw(st.integers(0, 20)), data.draw(st.integers(0, 4))
    num_experts = data.draw(st.sampled_from([1, 2, 255, 256, 257, 32768, 32769]))
    topk = data.draw(st.integers(1, min(num_experts, 18)))
    holes = data.draw(st.sets(st.integers(0, max(0, tokens - 1)))) if tokens else set()
    axis = data.draw(st.sampled_from(["moe", "all", tuple(range(3, 3 + layers))]))
    before = routes(
        tokens, layers, topk, num_experts, axis, tuple(holes), data.draw(st.integers(0, 9))
    )

    assert_same(before, Routes.from_wire(json.loads(json.dumps(before.to_wire()))))
    assert_same(before, Routes.from_bytes(memoryview(bytearray(before.to_bytes()))))


def test_orjson_takes_it() -> None:
    orjson = pytest.importorskip("orjson")
    before = CASES["holes"]

    assert_same(before, Routes.from_wire(orjson.loads(orjson.dumps(before.to_wire()))))


def test_the_dict_says_what_it_holds() -> None:
    message = Routes([[[1, 300]], [[2, 5]]], 512, captured=[True, False], start=7).to_wire()

    assert base64.b64decode(message.pop("expert_ids")) == b"\x01\x00\x2c\x01\x00\x00\x00\x00"
    assert base64.b64decode(message.pop("captured")) == b"\x01"
    assert isinstance(message.pop("crc32"), int)
    assert message == {
        "format": "replay-patch/routes",
        "version": 1,
        "byte_order": "little",
        "dtype": "int16",
        "shape": [2, 1, 2],
        "num_experts": 512,
        "start": 7,
        "layers": "moe",
        "empty_layers": [],
        "notes": None,
    }


def test_the_bytes_are_the_ids_and_a_header() -> None:
    before = routes(tokens=100)

    assert len(before.to_bytes()) == 48 + before.expert_ids.numel()
    assert before.to_bytes().endswith(before.expert_ids.numpy().tobytes())


def test_decoded_routes_own_their_memory() -> None:
    before = routes()
    message = bytearray(before.to_bytes())
    after = Routes.from_bytes(message)

    message[:] = bytes(len(message))

    assert_same(before, after)


def test_what_a_hole_holds_is_not_read() -> None:
    before = routes(tokens=3, layers=1, holes=(1,))
    message = before.to_wire()
    ids = bytearray(base64.b64decode(message["expert_ids"]))
    ids[2:4] = b"\xff\xff"
    message["expert_ids"] = base64.b64encode(ids).decode()

    assert_same(before, Routes.from_wire(message))


@pytest.mark.parametrize("start", [2**53, 2**70])
def test_what_no_message_can_say_is_not_encoded(start: int) -> None:
    with pytest.raises(WireError, match=r"start is .*: expected an integer from 0"):
        routes(start=start).to_wire()


def test_both_base64_libraries_agree(monkeypatch: Any) -> None:
    library = pytest.importorskip("pybase64")
    before = CASES["int16"]
    messages = []
    for module in (base64, library):
        monkeypatch.setattr(base64_text, "_base64", module)
        messages.append(before.to_wire())
        assert_same(before, Routes.from_wire(messages[-1]))
        for text in ("é" * len(messages[-1]["expert_ids"]), "!" * len(messages[-1]["expert_ids"])):
            with pytest.raises(WireError, match="expected base64 text"):
                Routes.from_wire(messages[-1] | {"expert_ids": text})

    assert messages[0] == messages[1]


def test_megatron_is_not_imported() -> None:
    assert interpreters.run(without_megatron.round_trip) == [2, []]
