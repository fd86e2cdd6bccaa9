"""Element types: the name in manifests, the code in safetensors headers, the numpy type."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

import ml_dtypes
import numpy as np

from elastic_train.errors import FormatUnsupported


@dataclass(frozen=True, slots=True, kw_only=True)
class Element:
    """One element type."""

    code: str
    numpy: np.dtype

    @property
    def bytes(self) -> int:
        return self.numpy.itemsize


ELEMENTS = MappingProxyType(
    {
        name: Element(code=code, numpy=np.dtype(kind))
        for name, code, kind in (
            ("float64", "F64", np.float64),
            ("float32", "F32", np.float32),
            ("float16", "F16", np.float16),
            ("bfloat16", "BF16", ml_dtypes.bfloat16),
            ("float8_e4m3fn", "F8_E4M3", ml_dtypes.float8_e4m3fn),
            ("float8_e5m2", "F8_E5M2", ml_dtypes.float8_e5m2),
            ("int64", "I64", np.int64),
            ("int32", "I32", np.int32),
            ("int16", "I16", np.int16),
            ("int8", "I8", np.int8),
            ("uint64", "U64", np.uint64),
            ("uint32", "U32", np.uint32),
            ("uint16", "U16", np.uint16),
            ("uint8", "U8", np.uint8),
            ("bool", "BOOL", np.bool_),
            ("complex64", "C64", np.complex64),
        )
    }
)
"""By name. Little-endian everywhere."""


def element(name: str, *, url: str) -> Element:
    """The element type of this name; FormatUnsupported if the format has none."""
    if name not in ELEMENTS:
        known = ", ".join(ELEMENTS)
        raise FormatUnsupported(
            url=url, problem=f"dtype {name!r} can't be stored. Cast the tensor to one of {known}."
        )
    return ELEMENTS[name]
