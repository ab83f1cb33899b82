"""What rollout engines return: every form of docs/routes.md becomes the same routes."""

import base64
import contextlib
import io
import tracemalloc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replay_patch import RouteError, Routes

E, L, K = 64, 3, 2
N, PROMPT = 10, 4
IDS = torch.rand(N, L, E, generator=torch.Generator().manual_seed(0)).argsort(2)[..., :K].numpy()
ROWS = IDS[: N - 1]


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def npy(ids: Any) -> str:
    file = io.BytesIO()
    np.save(file, ids)
    return b64(file.getvalue())


def raw(ids: Any, dtype: str = "int32") -> str:
    return b64(ids.astype(dtype).tobytes())


def read(payload: Any, engine: str = "vllm", **options: Any) -> Routes:
    given = {"num_experts": E, "num_tokens": N} | options
    return Routes.from_engine(payload, engine=engine, **given)


def completion(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(index=0, text="...", token_ids=list(range(N - PROMPT)), **fields)


def request(outputs: Any, **fields: Any) -> SimpleNamespace:
    return SimpleNamespace(prompt_token_ids=list(range(PROMPT)), outputs=outputs, **fields)


FLAT = {"topk": K, "num_layers": L}
FORMS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "vllm completion": ("vllm", completion(routed_experts=ROWS.astype(np.int32)), {}),
    "vllm request": ("vllm", request([completion(routed_experts=ROWS.astype(np.uint8))]), {}),
    "vllm uint16": ("vllm", completion(routed_experts=ROWS.astype(np.uint16)), {}),
    "vllm split": (
        "vllm",
        request(
            [completion(routed_experts=ROWS[PROMPT:].astype(np.int16))],
            prompt_routed_experts=ROWS[:PROMPT].astype(np.int16),
        ),
        {},
    ),
    "vllm split, other containers": (
        "vllm",
        {
            "prompt_routed_experts": ROWS[:PROMPT].tolist(),
            "choices": [{"routed_experts": torch.from_numpy(ROWS[PROMPT:])}],
        },
        {},
    ),
    "vllm split, in one dict": (
        "vllm",
        {"prompt_routed_experts": ROWS[:PROMPT], "routed_experts": ROWS[PROMPT:]},
        {},
    ),
    "vllm http": ("vllm", {"choices": [{"routed_experts": npy(ROWS.astype(np.uint8))}]}, {}),
    "vllm http, several": (
        "vllm",
        {"choices": [{"routed_experts": npy(ROWS[::-1])}, {"routed_experts": npy(ROWS)}]},
        {"choice": 1},
    ),
    "vllm http, Fortran order": ("vllm", npy(np.asfortranarray(ROWS)), {}),
    "vllm http, big-endian": ("vllm", npy(ROWS.astype(">i2")), {}),
    "vllm npy bytes": ("vllm", base64.b64decode(npy(ROWS)), {}),
    "dynamo": (
        "vllm",
        {"data": raw(ROWS, "int16"), "shape": list(ROWS.shape), "dtype": "int16"},
        {},
    ),
    "sglang generate": (
        "sglang",
        {"text": "...", "meta_info": {"routed_experts": raw(ROWS)}},
        FLAT,
    ),
    "sglang meta_info": ("sglang", {"routed_experts": raw(ROWS), "id": "1"}, FLAT),
    "sglang dtype": (
        "sglang",
        {"meta_info": {"routed_experts": raw(ROWS, "uint8"), "routed_experts_dtype": "uint8"}},
        FLAT,
    ),
    "sglang uint16": (
        "sglang",
        {"meta_info": {"routed_experts": raw(ROWS, "uint16"), "routed_experts_dtype": "uint16"}},
        FLAT,
    ),
    "sglang chat": ("sglang", {"choices": [{"meta_info": {"routed_experts": raw(ROWS)}}]}, FLAT),
    "sglang text": ("sglang", raw(ROWS, "uint8"), FLAT | {"dtype": "uint8"}),
    "sglang topk only": ("sglang", raw(ROWS), {"topk": K}),
    "sglang tensor": ("sglang", {"meta_info": {"routed_experts": torch.from_numpy(ROWS)}}, {}),
    "sglang flat tensor": ("sglang", torch.from_numpy(ROWS).flatten(), FLAT),
    "megatron request": ("megatron", SimpleNamespace(routing_indices=ROWS.astype(np.int16)), {}),
    "megatron serialized": (
        "megatron",
        {"routing_indices": ["ndarray", {"data": ROWS.tolist(), "dtype": "int16"}]},
        {},
    ),
    "megatron tensor": ("megatron", {"routing_indices": ("tensor", ROWS.tolist())}, {}),
    "megatron http": (
        "megatron",
        {
            "choices": [
                {"moe_topk_indices": ROWS.tolist(), "prompt_moe_topk_indices": ROWS[:4].tolist()}
            ]
        },
        {},
    ),
    "nested lists": ("vllm", ROWS.tolist(), {}),
    "list of arrays": ("vllm", list(ROWS), {}),
    "list of tensors": ("vllm", list(torch.from_numpy(ROWS)), {}),
    "memoryview": ("vllm", memoryview(np.ascontiguousarray(ROWS)), {}),
    "raw memoryview": ("sglang", memoryview(ROWS.astype(np.int32).tobytes()), FLAT),
    "read-only": ("vllm", np.frombuffer(ROWS.tobytes(), ROWS.dtype).reshape(ROWS.shape), {}),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_same_routes(form: str) -> None:  # 78, 84
    engine, payload, options = FORMS[form]

    routes = read(payload, engine, **options)

    assert routes.expert_ids.tolist() == ROWS.tolist()
    assert routes.expert_ids.dtype is torch.uint8
    assert routes.captured.all()
    assert (routes.start, routes.rejected) == (0, {})
    split = form.startswith("vllm split")
    assert routes.layers == ("moe" if engine == "megatron" or split else "all")


@pytest.mark.parametrize("num_experts, dtype", [(200, torch.uint8), (512, torch.int16)])
def test_the_dtype_follows_from_the_experts_and_not_from_what_was_seen(
    num_experts: int, dtype: Any
) -> None:  # 76
    small = read(ROWS.astype(np.uint16), num_experts=num_experts)
    assert small.expert_ids.dtype is dtype

    large = ROWS.astype(np.uint16)
    large[3, 1] = [300, 5]
    if num_experts == 512:
        assert read(large, num_experts=512).expert_ids[3, 1].tolist() == [300, 5]
    else:
        with pytest.raises(RouteError, match=r"token 3.*is \[300, 5\]: an id is out of range"):
            read(large, num_experts=200)


def test_the_layer_axis_is_what_the_caller_says() -> None:
    assert read(ROWS, layers=(2, 4, 5)).layers == (2, 4, 5)
    assert read(ROWS, layers="moe").layers == "moe"
    assert read(ROWS, "megatron", layers="all").layers == "all"


def test_dense_layers_of_zeros() -> None:
    ids = np.concatenate([np.zeros_like(ROWS[:, :1]), ROWS], axis=1)

    routes = read(ids)

    assert routes.empty_layers == (0,)
    assert routes.captured.all()


# --- rows -------------------------------------------------------------------------------------


def test_every_row_or_all_but_the_last() -> None:  # 44
    assert read(IDS).num_tokens == N
    assert read(IDS[:-1]).num_tokens == N - 1


@pytest.mark.parametrize("rows, start", [(3, 6), (9, 0)])
def test_servers_that_honour_a_start_and_others(rows: int, start: int) -> None:  # 70
    routes = read(ROWS[9 - rows :], start=6)

    assert (routes.start, routes.num_tokens) == (start, rows)
    whole = read(ROWS[:7], num_tokens=8).append(routes)
    assert whole.expert_ids.tolist() == ROWS.tolist()


@pytest.mark.parametrize("rows", [0, 2, 4, 5, 8, 10])
def test_other_numbers_of_rows_after_a_start_are_refused(rows: int) -> None:  # 70
    with pytest.raises(RouteError, match=f"{rows} rows for 10 tokens from token 6 on.*3 or 9"):
        read(IDS[:rows], start=6)


def test_the_start_in_the_payload() -> None:
    info = {"routed_experts": raw(ROWS[6:]), "routed_experts_start_len": 6}

    assert read({"meta_info": info}, "sglang", **FLAT).start == 6
    assert read({"meta_info": info}, "sglang", start=6, **FLAT).start == 6
    with pytest.raises(RouteError, match=r"start=5.*routed_experts_start_len=6"):
        read({"meta_info": info}, "sglang", start=5, **FLAT)


def test_nothing_new_after_a_start() -> None:
    routes = read(np.zeros((0, L, K), int), start=9)
    assert (routes.start, routes.num_tokens) == (9, 0)
    routes = read({"meta_info": {"routed_experts": ""}}, "sglang", start=9, **FLAT)
    assert (routes.start, routes.expert_ids.shape) == (9, (0, L, K))
    assert read([], start=10, **FLAT).start == 10


def test_rows_of_draft_tokens_are_refused() -> None:  # 31
    ids = np.concatenate([IDS, IDS[:3]])

    with pytest.raises(RouteError, match=r"13 rows for 10 tokens: expected 9 or 10.*not accepted"):
        read(ids)
    with pytest.raises(RouteError, match="13 rows for 10 tokens"):
        read(ids, on_invalid="hole")


def test_fewer_rows_are_refused_unless_they_are_said_to_be_missing() -> None:  # 44
    with pytest.raises(RouteError, match=r"8 rows for 10 tokens: expected 9 or 10.*missing=\.\.\."):
        read(IDS[:8])

    routes = read(IDS[:8], missing=2)  # prefill only, or an end token that the trainer added

    assert routes.num_tokens == N - 1
    assert routes.captured.tolist() == [True] * 8 + [False]
    with pytest.raises(RouteError, match="9 rows for 10 tokens: expected 8"):
        read(IDS[:9], missing=2)
    with pytest.raises(RouteError, match="9 rows for 10 tokens: expected 10"):
        read(IDS[:9], missing=0)


def test_half_of_the_split_form_is_refused() -> None:
    with pytest.raises(RouteError, match=r"5 rows for 10 tokens.*prompt_routed_experts"):
        read(completion(routed_experts=ROWS[PROMPT:]))


def test_prompt_rows_must_be_those_of_the_prompt() -> None:
    with pytest.raises(RouteError, match="prompt_routed_experts has 3 rows: expected 4"):
        read(request([completion(routed_experts=ROWS[3:])], prompt_routed_experts=ROWS[:3]))


def test_short_trajectories() -> None:
    assert read(IDS[:0], num_tokens=1).num_tokens == 0
    assert read(IDS[:0], num_tokens=0).num_tokens == 0
    assert read(IDS[:1], num_tokens=1).num_tokens == 1


# --- holes and errors -------------------------------------------------------------------------


def test_cached_positions_are_holes() -> None:
    ids = ROWS.copy()
    ids[:3] = -1

    routes = read(
        request(
            [completion(routed_experts=ids[PROMPT:].astype(np.uint8))],
            prompt_routed_experts=ids[:PROMPT].astype(np.int16),
        )
    )

    assert routes.captured.tolist() == [False] * 3 + [True] * 6
    assert routes.rejected == {}


@pytest.mark.parametrize(
    "engine, key", [("vllm", "routed_experts"), ("megatron", "routing_indices")]
)
def test_a_field_that_got_lost_is_named(engine: str, key: str) -> None:  # 73
    samples = [{key: ROWS}, {"token_ids": [1, 2]}]

    assert read(samples[0], engine, name="trajectory 0").captured.all()
    with pytest.raises(RouteError, match=f"^trajectory 1: no field '{key}'.*asked for"):
        read(samples[1], engine, name="trajectory 1")
    with pytest.raises(RouteError, match="no field"):
        read(samples[1], engine, on_invalid="hole")


def test_a_preempted_request_has_none() -> None:
    for payload in (None, completion(routed_experts=None), {"choices": [{"routed_experts": None}]}):
        with pytest.raises(RouteError, match=r"turn 2: no routes were returned.*on_invalid='hole'"):
            read(payload, name="turn 2")
        with pytest.raises(RouteError, match=r"say topk=\.\.\. and num_layers=\.\.\."):
            read(payload, on_invalid="hole")

        routes = read(payload, on_invalid="hole", **FLAT)

        assert routes.expert_ids.shape == (N - 1, L, K)
        assert not routes.captured.any()
        assert routes.rejected == {"missing": N - 1}


@pytest.mark.parametrize(
    "row, cause", [([E, 1], "out of range"), ([-7, 1], "out of range"), ([3, 3], "repeating")]
)
def test_a_bad_row_raises_or_is_a_counted_hole(row: list[int], cause: str) -> None:  # 75
    ids = ROWS.copy()
    ids[4, 1] = row

    with pytest.raises(RouteError, match=r"trajectory 3: expert_ids\[4, 1\] \(token 4"):
        read(ids, name="trajectory 3")
    routes = read(ids, on_invalid="hole")

    assert routes.captured.tolist() == [i != 4 for i in range(9)]
    assert routes.rejected == {cause: 1}


@pytest.mark.parametrize("on_invalid", ["raise", "hole"])
def test_columns_of_shared_experts_are_refused(on_invalid: str) -> None:  # 75
    shared = np.full_like(ROWS[..., :1], E)
    ids = np.concatenate([ROWS, shared], axis=2)

    with pytest.raises(RouteError, match=r"3 columns.*64 or more in every row.*Shared experts"):
        read(ids, on_invalid=on_invalid)
    with pytest.raises(
        RouteError, match=r"3 columns of ids: expected topk=2[.] Are shared experts"
    ):
        read(ids, on_invalid=on_invalid, topk=2)
    with pytest.raises(RouteError, match=r"multiple of 6|rows for 10 tokens"):
        read(raw(ids), "sglang", on_invalid=on_invalid, **FLAT)


def test_a_row_of_zeros_was_never_written() -> None:
    ids = ROWS.copy()
    ids[2] = ids[5] = 0

    with pytest.raises(RouteError, match=r"row 2 \(token 2\) has nothing but zeros.*never written"):
        read(ids)
    routes = read(ids, on_invalid="hole")

    assert routes.captured.tolist() == [i not in (2, 5) for i in range(9)]
    assert routes.rejected == {"unwritten": 2}
    assert read(np.zeros_like(ROWS), on_invalid="hole").rejected == {"unwritten": 9}


def test_zeros_that_fill_in_for_the_last_token_are_a_hole() -> None:  # 44
    routes = read(np.concatenate([ROWS, np.zeros_like(ROWS[:1])]))

    assert routes.captured.tolist() == [True] * 9 + [False]
    assert routes.rejected == {}


def test_with_one_expert_for_each_token_zeros_are_a_choice() -> None:
    assert read(np.zeros((9, L, 1), int)).captured.all()


def long(tokens: int, layers: int = L, num_experts: int = E, topk: int = K) -> Any:
    chance = torch.Generator().manual_seed(1)
    scores = torch.rand(tokens, layers, num_experts, generator=chance)
    return scores.argsort(2)[..., :topk].numpy()


def test_the_same_row_many_times_was_never_written() -> None:
    ids = long(99)
    ids[40:56] = ids[40]

    with pytest.raises(RouteError, match=r"row 40 .*for more than 15 tokens.*15 more tokens"):
        read(ids, num_tokens=100)
    routes = read(ids, num_tokens=100, on_invalid="hole")

    assert routes.captured.tolist() == [not 40 <= i < 56 for i in range(99)]
    assert not routes.expert_ids[40:56].any()
    assert routes.rejected == {"unwritten": 16}
    assert read(ids, num_tokens=100, max_run=16).captured.all()


def test_runs_up_to_a_limit_are_choices() -> None:
    ids = long(99)
    ids[40:55] = ids[40]
    ids[70:90, 2] = ids[70, 2]  # one layer only

    assert read(ids, num_tokens=100).captured.all()


def test_in_a_small_model_a_run_must_be_longer() -> None:
    ids = long(99, layers=1, num_experts=4, topk=1)
    ids[20:80] = 0

    assert read(ids, num_tokens=100, num_experts=4).captured.all()  # 2 bits for each token
    ids[10:90] = 0
    with pytest.raises(RouteError, match="for more than 64 tokens"):
        read(ids, num_tokens=100, num_experts=4)
    assert read(
        long(99, 1, 2, 2)[:, :, :2] * 0 + [0, 1], num_tokens=100, num_experts=2
    ).captured.all()


def test_dense_layers_do_not_hide_a_run() -> None:
    ids = long(99)
    ids[:, 0] = 0
    ids[:] = ids[:1]

    with pytest.raises(RouteError, match=r"row 0 .*98 more tokens"):
        read(ids, num_tokens=100)


def test_holes_are_no_run() -> None:
    ids = long(99)
    ids[40:80] = -1

    assert read(ids, num_tokens=100).rejected == {}


# --- what cannot be understood ----------------------------------------------------------------


def header(shape: str, descr: str = "<i4", data: bytes = b"") -> str:
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b64(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + data)


@pytest.mark.parametrize(
    "payload, options, text",
    [
        ("!!!!", FLAT, "no base64"),
        ("é", FLAT, "no base64"),
        (raw(ROWS)[:-1], FLAT, "no base64"),
        (raw(ROWS), {}, "on one axis: expected topk=... and num_layers=..."),
        (raw(ROWS), {"num_layers": L}, "expected topk="),
        (
            raw(ROWS, "uint8"),
            FLAT,
            r"54 bytes of ids do not fit dtype 'int32'; dtype='uint8' or 'int8'",
        ),
        (raw(ROWS), FLAT | {"dtype": "float32"}, "dtype='float32': expected one of uint8"),
        (
            raw(ROWS),
            FLAT | {"dtype": "int16"},
            "216 bytes .* dtype 'int16'; dtype='int32' would fit",
        ),
        (b64(b"abc"), FLAT, "3 bytes of ids do not fit dtype 'int32'"),
        (raw(ROWS.reshape(-1)[:-1]), FLAT, "53 ids: expected a multiple of 6"),
        (header("(1000000000, 3, 2)"), {}, "0 bytes after the header: expected 24000000000"),
        (header("(9, 3, 2)", data=bytes(215)), {}, "215 bytes after the header: expected 216"),
        (header("(54,)", data=bytes(216)), {}, r"shape \[54\]"),
        (header("(9, 3, 2)", "|O"), {}, "expected an array of integers"),
        (header("(9, 3, 2)", "<f4", bytes(216)), {}, "expected an array of integers"),
        (header("(9, -3, -2)", data=bytes(216)), {}, "expected an array of integers"),
        (header("(__import__('os').abort(), 1, 1)"), {}, "expected an array of integers"),
        (b64(b"\x93NUMPY"), {}, "expected an array of integers"),
        (b64(b"\x93NUMPY\x02\x00\xff\xff\xff\xff"), {}, "expected an array of integers"),
        (ROWS.astype(float), {}, "expected integers"),
        (ROWS[0], {}, r"shape \[3, 2\]"),
        (ROWS[None], {}, r"shape \[1, 9, 3, 2\]"),
        ([[[1, 2]], [[3]]], {}, "no array of ids"),
        ([[["a", "b"]]], {}, "expected integers"),
        ([{"meta_info": {}}], {}, "a list of 1 responses"),
        ([completion(outputs=[])], {}, "a list of 1 responses"),
        ({"choices": [{}, {}]}, {}, r"2 choices in the response: expected one; say choice="),
        ({"choices": [{}, {}]}, {"choice": 2}, "choice is 2: expected less than 2"),
        ({"data": raw(ROWS), "shape": [9, 3]}, {}, r"shape is \[9, 3\]"),
        ({"data": raw(ROWS), "shape": [9, 3, 3]}, {}, "54 ids: expected 81"),
        ({"data": raw(ROWS), "shape": [9, True, 6]}, {}, "a size in shape is True"),
        (5, {}, "no field 'routed_experts' in the int"),
        (torch.zeros(9, 3, 2, dtype=torch.int64, device="meta"), {}, "is on meta"),
        (ROWS, {"engine": "tgi"}, "engine='tgi': expected 'vllm' or 'sglang' or 'megatron'"),
        (ROWS, {"on_invalid": "skip"}, "on_invalid='skip'"),
        (ROWS, {"num_tokens": 10.0}, "num_tokens is 10.0"),
        (ROWS, {"num_experts": 0}, "num_experts is 0"),
        (ROWS, {"start": 11}, "start is 11: expected at most num_tokens=10"),
        (ROWS, {"num_layers": 4}, "3 layers of ids: expected num_layers=4"),
        (ROWS, {"topk": 1}, "2 columns of ids: expected topk=1"),
        (ROWS, {"topk": 3}, "2 columns of ids: expected topk=3"),
        (ROWS, {"layers": "dense"}, "layers='dense'"),
        (ROWS, {"max_run": 0}, "max_run is 0"),
    ],
)
def test_refused(payload: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(RouteError, match=text):
        read(payload, **({"engine": "vllm"} | options))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_changed_payload_does_harm(data: Any) -> None:
    file = bytearray(base64.b64decode(npy(ROWS.astype(np.uint8))))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(file) - 1))
        piece = data.draw(st.binary(max_size=8))
        file[place : place + len(piece)] = piece
    payload = data.draw(st.sampled_from([bytes(file), b64(file), {"routed_experts": b64(file)}]))

    tracemalloc.start()
    with contextlib.suppress(RouteError):
        read(payload, on_invalid="hole")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert peak < 200_000
