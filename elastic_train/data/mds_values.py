"""Values of MDS columns from their bytes, by the encodings of streaming/base/format/mds/encodings.py."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from decimal import Decimal
from importlib import import_module
from types import MappingProxyType
from typing import Any

import numpy as np

from elastic_train.errors import ConfigError

Decoder = Callable[[bytes], Any]

_DTYPES = {8: "u1", 9: "i1", 16: "<u2", 17: "<i2", 18: "<f2", 32: "<u4", 33: "<i4", 34: "<f4"}
_DTYPES |= {64: "<u8", 65: "<i8", 66: "<f8"}
_SCALARS = tuple(
    f"{kind}{bits}"
    for kind, sizes in (("uint", (8, 16, 32, 64)), ("int", (8, 16, 32, 64)), ("float", (16, 32, 64)))
    for bits in sizes
)


def decoder_of(encoding: str, column: str, own: Mapping[str, Decoder] = MappingProxyType({})) -> Decoder:
    """What makes a value of a column's bytes. ConfigError for an encoding that is not known, or unsafe."""
    kind, _, settings = encoding.partition(":")
    found = own.get(encoding) or own.get(kind)
    if found is None and kind == "ndarray":
        return _array_decoder(settings)
    found = found or _PLAIN.get(encoding)
    if found is not None:
        return found
    unsafe = kind == "pkl"
    raise ConfigError(
        field="data",
        problem=f"column {column!r} is "
        + ("pickled, and reading it runs code." if unsafe else f"{encoding}, which is not known."),
        remedy='Leave it out with columns=[...], or give decoders={"pkl": pickle.loads} where you trust it.'
        if unsafe
        else f"Leave it out with columns=[...], or give decoders={{{kind!r}: function of its bytes}}.",
    )


def _array_decoder(settings: str) -> Decoder:
    """ndarray, ndarray:dtype or ndarray:dtype:shape; what isn't in the name is at the head of the bytes."""
    dtype_name, _, shape_text = settings.partition(":")
    fixed = tuple(int(size) for size in shape_text.split(",")) if shape_text else None

    def decode(data: bytes) -> np.ndarray:
        at = 0
        if dtype_name:
            dtype = np.dtype(dtype_name)
        else:
            dtype, at = np.dtype(_DTYPES[data[0]]), 1
        shape = fixed
        if shape is None:
            dims, wide = data[at] >> 2, np.dtype(f"<u{1 << data[at] % 4}")
            shape = tuple(np.frombuffer(data, dtype=wide, count=dims, offset=at + 1).tolist())
            at += 1 + dims * wide.itemsize
        return np.frombuffer(data, dtype=dtype, offset=at).reshape(shape).copy()

    return decode


def _scalar_decoder(name: str) -> Decoder:
    return lambda data: np.frombuffer(data, dtype=name)[0]


def _image(data: bytes) -> Any:
    found = _pillow().open(io.BytesIO(data))
    found.load()
    return found


def _raw_image(data: bytes) -> Any:
    width, height, mode_bytes = np.frombuffer(data, dtype="<u4", count=3).tolist()
    mode = data[12 : 12 + mode_bytes].decode()
    return _pillow().frombytes(mode, (width, height), data[12 + mode_bytes :])


def _pillow() -> Any:
    try:
        return import_module("PIL.Image")
    except ImportError as error:
        raise ConfigError(
            field="data",
            problem="images are decoded by Pillow, which is not installed.",
            remedy="pip install pillow, or leave the column out.",
        ) from error


def _list_decoder(of: Decoder, head: int) -> Decoder:
    """Parts behind their sizes; `head` bytes come before their number."""

    def decode(data: bytes) -> list[Any]:
        number = int(np.frombuffer(data, dtype="<u4", count=1, offset=head)[0])
        sizes = np.frombuffer(data, dtype="<u4", count=number, offset=head + 4)
        ends = head + 4 + 4 * number + np.cumsum(sizes, dtype=np.int64)
        return [of(data[int(end - size) : int(end)]) for end, size in zip(ends, sizes, strict=True)]

    return decode


_PLAIN: Mapping[str, Decoder] = MappingProxyType(
    {
        "bytes": bytes,
        "str": bytes.decode,
        "int": lambda data: int(np.frombuffer(data, dtype="<i8")[0]),
        "json": json.loads,
        "str_int": int,
        "str_float": float,
        "str_decimal": lambda data: Decimal(data.decode()),
        **{name: _scalar_decoder(name) for name in _SCALARS},
        "pil": _raw_image,
        **dict.fromkeys(("jpeg", "png"), _image),
        "list[pil]": _list_decoder(_raw_image, 4),
        **dict.fromkeys(("list[jpeg]", "list[png]"), _list_decoder(_image, 4)),
        **dict.fromkeys(("jpegarray", "jpeg_array"), _list_decoder(_image, 0)),
    }
)
