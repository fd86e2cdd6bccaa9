"""Reading the structure of a pickled file without running it: inert stubs stand for everything it names.

A pickle is a program that calls what it names. Here a name is looked up in a closed list, and what is called
builds a value of this file. A name that isn't on the list refuses the file.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from elastic_train.errors import CheckpointError, ChecksumMismatch, FormatUnsupported


@dataclass(frozen=True, slots=True)
class Storage:
    """The bytes behind tensors: one entry of the file. `dtype` is None where each tensor says its own."""

    key: str
    dtype: str | None
    numel: int


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor as a view of a storage; offset and strides in elements."""

    storage: Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Opaque:
    """An object of another library: what it was called with and its state, without its class."""

    kind = ""

    def __new__(cls, *args: Any, **_: Any) -> Opaque:
        self = object.__new__(cls)
        self.args, self.state = args, None
        return self

    def __init__(self, *args: Any, **_: Any) -> None:
        self.args: tuple[Any, ...]
        self.state: Any

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str) -> Any:
        """An attribute that was pickled, or None."""
        return self.state.get(name) if isinstance(self.state, dict) else None


OPAQUE = frozenset({"argparse", "datetime", "deepspeed", "megatron", "numpy", "pathlib"})
"""Packages whose objects appear in client states and settings; they become `Opaque` and run nothing."""

STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "UntypedStorage": None,
}
DTYPES = frozenset(
    (
        "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "int32",
        "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool", "complex64", "complex128",
    )
)  # fmt: skip
DCP = {
    "metadata": (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    ),
    "filesystem": ("_StorageInfo", "_StoragePrefix"),
    "planner": ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"),
}  # fmt: skip
"""What the metadata of a torch.distributed.checkpoint is made of; each becomes an `Opaque` of that kind."""


def unpickle(data: bytes, *, url: str) -> Any:
    """The structure of a pickle: containers, numbers, text, `TensorRef` and `Opaque`.

    FormatUnsupported names what isn't on the list; ChecksumMismatch where the bytes are no pickle.
    """
    try:
        return _Reader(data, url).load()
    except CheckpointError:
        raise
    except (
        pickle.UnpicklingError, EOFError, ArithmeticError, AssertionError, AttributeError, ImportError,
        LookupError, MemoryError, TypeError, ValueError,
    ) as error:  # fmt: skip
        raise ChecksumMismatch(
            url=url, problem=f"its index is damaged ({error}). Copy the file again."
        ) from error


class _Reader(pickle.Unpickler):
    """Python's own parser of the format, with nothing to call but this file's functions.

    Each load gets its own callables: a pickle may set attributes on what it names.
    """

    def __init__(self, data: bytes, url: str) -> None:
        super().__init__(io.BytesIO(data))
        self._url = url

    def find_class(self, module: str, name: str) -> Any:
        found = _KNOWN.get((module, name))
        if found is not None:
            return found()
        if module in ("torch", "torch.storage") and name in STORAGES:
            return _StorageKind(STORAGES[name])
        if module == "torch" and name in DTYPES:
            return name
        if module.partition(".")[0] in OPAQUE:
            return type("Opaque", (Opaque,), {"kind": f"{module}.{name}"})
        raise FormatUnsupported(
            url=self._url,
            problem=f"it names {module}.{name}, which is not on the list of what may be read, and was not "
            "run. If you "
            "trust the file, load it with the system that wrote it and save plain tensors and numbers.",
        )

    def persistent_load(self, pid: Any) -> Storage:
        word, kind, key, _, numel = pid
        if word != "storage" or not isinstance(kind, _StorageKind):
            raise pickle.UnpicklingError(f"unknown reference {pid!r}")
        return Storage(str(key), kind.dtype, int(numel))


@dataclass(frozen=True, slots=True)
class _StorageKind:
    dtype: str | None


def _tensor(
    storage: Storage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: Any
) -> TensorRef:
    return _typed_tensor(storage, offset, shape, strides, None, None, storage.dtype)


def _typed_tensor(
    storage: Storage,
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    requires_grad: Any,
    hooks: Any,
    dtype: str | None,
    *_: Any,
) -> TensorRef:
    if dtype not in DTYPES or len(shape) != len(strides) or min((offset, *shape, *strides), default=0) < 0:
        raise pickle.UnpicklingError(f"a tensor of dtype {dtype}, shape {shape} and strides {strides}")
    return TensorRef(storage, dtype, int(offset), tuple(map(int, shape)), tuple(map(int, strides)))


def _of_type(build: Callable[..., Any], kind: Any, arguments: tuple[Any, ...], *_: Any) -> Any:
    return build(*arguments)


def _first(value: Any, *_: Any) -> Any:
    return value


def _text_bytes(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes in {encoding}")
    return text.encode("latin1")


def _number(dtype: Opaque, data: bytes) -> Any:
    """A numpy scalar as a Python number."""
    return np.frombuffer(data, dtype=np.dtype(str(dtype.args[0])).newbyteorder("<"), count=1).item()


def _called(function: Callable[..., Any]) -> Callable[[], Any]:
    return lambda: partial(function)


def _stub(kind: str) -> Callable[[], Any]:
    return lambda: type("Opaque", (Opaque,), {"kind": kind})


_KNOWN: dict[tuple[str, str], Callable[[], Any]] = {
    ("collections", "OrderedDict"): lambda: OrderedDict,
    ("collections", "defaultdict"): lambda: defaultdict,
    **{
        (module, kind.__name__): lambda kind=kind: kind
        for kind in (set, frozenset, complex, dict, list, tuple, int, float, str, bool)
        for module in ("builtins", "__builtin__")
    },
    ("_codecs", "encode"): _called(_text_bytes),
    ("numpy.core.multiarray", "scalar"): _called(_number),
    ("numpy._core.multiarray", "scalar"): _called(_number),
    ("torch", "Size"): lambda: tuple,
    ("torch", "device"): _stub("torch.device"),
    ("torch", "Tensor"): _stub("torch.Tensor"),
    ("torch.nn.parameter", "Parameter"): _stub("torch.nn.Parameter"),
    ("torch.nn.parameter", "Buffer"): _stub("torch.nn.Buffer"),
    ("torch._utils", "_rebuild_tensor"): _called(_tensor),
    ("torch._utils", "_rebuild_tensor_v2"): _called(_tensor),
    ("torch._utils", "_rebuild_tensor_v3"): _called(_typed_tensor),
    ("torch._utils", "_rebuild_parameter"): _called(_first),
    ("torch._utils", "_rebuild_parameter_with_state"): _called(_first),
    ("torch._tensor", "_rebuild_from_type_v2"): _called(_of_type),
    ("torch.serialization", "_get_layout"): _called(_first),
    **{
        (f"torch.distributed.checkpoint.{module}", name): _stub(
            f"torch.distributed.checkpoint.{module}.{name}"
        )
        for module, names in DCP.items()
        for name in names
    },
}
"""What may be named, and what then takes its place: a new object for each file."""
