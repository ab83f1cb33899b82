"""The packings in which engines send ids, as integers [R, L, K] on the host: arrays and nested
lists of any library; base64 of a .npy file, or of raw little-endian ids; the same as bytes; dicts
of data, dtype and perhaps shape. What is read is bounded by what is there."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from replay_patch.errors import RouteError
from replay_patch.routes.arguments import integer
from replay_patch.routes.expert_ids import host_ids
from replay_patch.routes.responses.response_fields import PayloadOptions
from replay_patch.routes.wire import base64_text

_NPY = b"\x93NUMPY"
# What numpy writes into a .npy file of a plain array. np.load would allocate what a header claims
# before it looks how much there is.
_NPY_HEADER = re.compile(
    rb"\{\s*'descr':\s*'(?P<descr>[<>|=][iu][1248])',\s*'fortran_order':\s*(?P<fortran>True|False),"
    rb"\s*'shape':\s*\((?P<shape>[0-9, ]{0,100})\),?\s*\}\s*"
)
_DTYPES = ("uint8", "int8", "uint16", "int16", "int32", "int64")


def unpacked_ids(value: Any, options: PayloadOptions, rows: Sequence[int] = ()) -> Tensor:
    """Integers [R, L, K], uint8 or signed, on the host; a RouteError for anything else. Flat ids
    need K and L of `options`, raw bytes its dtype. `rows`: how many there may be, if known."""
    if isinstance(value, list | tuple) and len(value) == 2 and isinstance(value[0], str):
        value = value[1]  # Megatron's serialize(): ("ndarray", {...}), ("tensor", [...])
    if isinstance(value, Mapping):
        value = _from_mapping(value, options)
    if isinstance(value, str):
        value = _from_base64(value)
    if isinstance(value, memoryview) and (value.ndim != 1 or value.format != "B"):
        value = np.asarray(value)
    if isinstance(value, bytes | bytearray | memoryview):
        value = _from_npy(value) if bytes(value[:6]) == _NPY else _from_raw(value, options, rows)
    elif not isinstance(value, Tensor):
        try:
            value = np.asarray(value)
        except (ValueError, TypeError) as error:  # ragged; device tensors in a list
            raise RouteError(f"no array of ids: {error}") from None
        if value.shape == (0,):  # [] says nothing about its type
            value = value.astype(np.int32)
    if value.ndim == 1:
        value = _on_three_axes(value, options, rows)
    return host_ids(value)


def _from_mapping(value: Mapping[str, Any], options: PayloadOptions) -> Any:
    """The array of {"data", "dtype", perhaps "shape"}."""
    data, shape = value.get("data"), value.get("shape")
    if isinstance(data, str):
        data = _from_base64(data)
    if not isinstance(data, bytes | bytearray):
        return data
    flat = _from_raw(data, replace(options, dtype=value.get("dtype") or options.dtype), ())
    if shape is None:
        return flat
    if not isinstance(shape, list | tuple) or len(shape) != 3:
        raise RouteError(f"shape is {shape!r}: expected [tokens, layers, topk]")
    sizes = [integer("a size in shape", size, 0) for size in shape]
    if math.prod(sizes) != len(flat):
        raise RouteError(f"{len(flat)} ids: expected {math.prod(sizes)}, of shape {sizes}")
    return flat.reshape(sizes)


def _from_base64(text: str) -> bytes:
    try:
        return base64_text.decode(text)
    except ValueError as error:  # another alphabet; not ASCII
        raise RouteError(f"text of {len(text)} characters is no base64: {error}") from None


def _from_npy(file: Any) -> Any:
    """The array of a .npy file, which claims no more than is there."""
    data = memoryview(file)
    wide = len(data) > 6 and data[6] > 1
    first = 12 if wide else 10
    size = int.from_bytes(data[8:first], "little")
    header = _NPY_HEADER.fullmatch(data[first : first + size])
    if header is None or first + size > len(data):
        raise RouteError(
            f"a .npy file with the header {bytes(data[:100])!r}: expected an array of integers"
        )
    shape = [int(length) for length in header["shape"].replace(b",", b" ").split()]
    dtype = np.dtype(header["descr"].decode())
    body_size = len(data) - first - size
    if math.prod(shape) * dtype.itemsize != body_size:
        raise RouteError(
            f"a .npy file of {body_size} bytes after the header: expected "
            f"{math.prod(shape) * dtype.itemsize}, {dtype} of shape {shape}"
        )
    if len(shape) != 3:
        raise RouteError(f"a .npy file of shape {shape}: expected [tokens, layers, topk]")
    order: Any = "F" if header["fortran"] == b"True" else "C"
    return np.frombuffer(data[first + size :], dtype).reshape(shape, order=order)


def _from_raw(data: Any, options: PayloadOptions, rows: Sequence[int]) -> Any:
    """1-D, from little-endian ids one after the other."""
    name = str(options.dtype or "int32").removeprefix("torch.")
    if name not in _DTYPES:
        raise RouteError(f"dtype={options.dtype!r}: expected one of {', '.join(_DTYPES)}")
    dtype = np.dtype(name).newbyteorder("<")
    row = (options.topk or 0) * (options.num_layers or 0)
    fits = [n for n in _DTYPES if _row_count(len(data), row * np.dtype(n).itemsize) in rows]
    if len(data) % dtype.itemsize or (fits and name not in fits):
        hint = f"; dtype={' or '.join(map(repr, fits))} would fit" if fits else ""
        raise RouteError(f"{len(data)} bytes of ids do not fit dtype {name!r}{hint}")
    return np.frombuffer(data, dtype)


def _row_count(size: int, row: int) -> int:
    """How many rows so many bytes are; -1 if a row's size is 0, or they are no whole number."""
    return size // row if row and size % row == 0 else -1


def _on_three_axes(flat: Any, options: PayloadOptions, rows: Sequence[int]) -> Any:
    """[R, L, K], from one axis."""
    size, topk, num_layers = len(flat), options.topk, options.num_layers
    if topk is not None and num_layers is None and integer("topk", topk, 1):
        fits = [count for count in rows if count and size and size % (count * topk) == 0]
        if len(fits) == 1:
            num_layers = size // (fits[0] * topk)
    if topk is None or num_layers is None:
        raise RouteError(
            f"{size} ids on one axis: expected topk=... and num_layers=..., which alone say what "
            "the layers and columns are"
        )
    row = integer("num_layers", num_layers, 0) * integer("topk", topk, 1)
    if size % row if row else size:
        raise RouteError(f"{size} ids: expected a multiple of {row}, num_layers * topk")
    return flat.reshape(size // row if row else 0, num_layers, topk)
