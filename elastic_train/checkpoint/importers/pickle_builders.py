"""The functions that may be called in a pickle, each written anew: they make values and nothing else."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from elastic_train.checkpoint.importers.pickle_names import DTYPES
from elastic_train.checkpoint.importers.pickle_values import (
    Builder,
    Kind,
    OddTensor,
    Opaque,
    Storage,
    TensorRef,
)

DIMS = 64
MOST = 2**63


def _tensor(
    storage: Any,
    offset: Any,
    shape: Any,
    strides: Any,
    requires_grad: Any = None,
    hooks: Any = None,
    metadata: Any = None,
) -> TensorRef | OddTensor:
    if not isinstance(storage, Storage):
        raise ValueError("a tensor without a storage")
    return _typed_tensor(storage, offset, shape, strides, requires_grad, hooks, storage.dtype, metadata)


def _typed_tensor(
    storage: Any,
    offset: Any,
    shape: Any,
    strides: Any,
    requires_grad: Any,
    hooks: Any,
    dtype: Any,
    metadata: Any = None,
) -> TensorRef | OddTensor:
    if not isinstance(storage, Storage) or dtype not in DTYPES:
        raise ValueError(f"a tensor of dtype {dtype!r:.80} in a {type(storage).__name__}")
    if not isinstance(shape, tuple) or not isinstance(strides, tuple) or len(shape) != len(strides):
        raise ValueError("a tensor whose shape and strides don't fit together")
    numbers = (offset, *shape, *strides)
    if len(shape) > DIMS or not all(type(n) is int and 0 <= n < MOST for n in numbers):
        raise ValueError(f"a tensor of {len(shape)} dims, or with a size that no tensor has")
    if math.prod(n for n in shape if n) >= MOST:
        raise ValueError("a tensor with more elements than there can be")
    if metadata:
        said = sorted(str(k) for k, v in metadata.items() if v) if isinstance(metadata, dict) else ["?"]
        if said:
            named = {"conj": "a conjugated view", "neg": "a negated view"}
            what = " and ".join(named.get(word, f"a tensor with the flag {word!r:.40}") for word in said)
            return OddTensor(
                what=what, remedy="Save it as it is read: .resolve_conj().resolve_neg().clone()."
            )
    return TensorRef(storage, dtype, offset, shape, strides)


def _of_type(build: Any, kind: Any, arguments: Any, state: Any = None) -> Any:
    """A tensor with a class and attributes of its own."""
    if not isinstance(build, Builder) or build.name not in _TENSORS or not isinstance(arguments, tuple):
        return OddTensor(what=f"a tensor of the class {_called(kind)}", remedy="Save it as a plain tensor.")
    if isinstance(kind, Kind) and kind.name in _PLAIN:
        return _with_attributes(build.build(*arguments), state)
    return OddTensor(what=f"a tensor of the class {_called(kind)}", remedy="Save it as a plain tensor.")


def _called(kind: Any) -> str:
    return kind.name if isinstance(kind, Kind | Builder) else "?"


def odd(what: str, remedy: str) -> Callable[..., OddTensor]:
    return lambda *_: OddTensor(what=what, remedy=remedy)


def _parameter(value: Any, requires_grad: Any = None, hooks: Any = None, state: Any = None) -> Any:
    if not isinstance(value, TensorRef | OddTensor):
        raise ValueError(f"a parameter that is a {type(value).__name__}")
    return _with_attributes(value, state)


def _with_attributes(value: Any, state: Any) -> Any:
    parts = state if isinstance(state, tuple) else (state,)
    names = tuple(str(name)[:80] for part in parts if isinstance(part, dict) for name in part)
    return replace(value, attributes=names) if names and isinstance(value, TensorRef) else value


def _layout(name: Any) -> str:
    if not isinstance(name, str):
        raise ValueError("a layout without a name")
    return name


def _text_bytes(text: Any, encoding: Any = "utf-8") -> bytes:
    if not isinstance(text, str) or encoding != "latin1":
        raise ValueError(f"bytes in {encoding!r:.40}")
    return text.encode("latin1")


_NUMBERS = {
    "f8": "<d", "f4": "<f", "f2": "<e", "i8": "<q", "i4": "<i", "i2": "<h", "i1": "<b", "u8": "<Q",
    "u4": "<I", "u2": "<H", "u1": "<B", "b1": "<?",
}  # fmt: skip


def _number(dtype: Any, data: Any = None) -> Any:
    """A numpy scalar as a Python number."""
    code = dtype.args[0] if isinstance(dtype, Opaque) and dtype.args else None
    form = _NUMBERS.get(code.lstrip("<|=")) if isinstance(code, str) else None
    if form is None or not isinstance(data, bytes) or len(data) != struct.calcsize(form):
        return Opaque("numpy scalar")
    return struct.unpack(form, data)[0]


def _mapping(*arguments: Any) -> dict[Any, Any]:
    """A new dictionary, of pairs if any; only flat keys, each once."""
    if not arguments:
        return {}
    (pairs,) = arguments
    if not isinstance(pairs, list | tuple) or not all(isinstance(p, list | tuple) for p in pairs):
        raise ValueError("a dictionary of what are no pairs")
    found: dict[Any, Any] = {}
    for key, value in pairs:
        if not isinstance(key, str | int) or key in found:
            raise ValueError(f"the key {key!r:.80} in a dictionary")
        found[key] = value
    return found


def _with_default(*_: Any) -> dict[Any, Any]:
    return {}


def _items(make: Callable[..., Any]) -> Callable[..., Any]:
    """A container of a list of atoms."""

    def build(items: Any = ()) -> Any:
        if not isinstance(items, list | tuple) or any(
            not isinstance(i, str | bytes | int | float | type(None)) for i in items
        ):
            raise ValueError("a set of what is no text or number")
        return make(items)

    return build


def _sequence(items: Any = ()) -> Any:
    if not isinstance(items, list | tuple):
        raise ValueError("a list of what is none")
    return tuple(items)


def _bytes(*arguments: Any) -> bytes:
    if arguments and not isinstance(arguments[0], bytes):
        raise ValueError("bytes of what are none")
    return arguments[0] if arguments else b""


def _complex(real: Any, imaginary: Any) -> complex:
    if not all(isinstance(n, int | float) for n in (real, imaginary)):
        raise ValueError("a complex number of what are none")
    return complex(real, imaginary)


_PLAIN = frozenset({"torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer"})
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": _mapping,
    "collections.defaultdict": _with_default,
    "_codecs.encode": _text_bytes,
    "numpy.core.multiarray.scalar": _number,
    "numpy._core.multiarray.scalar": _number,
    "torch.Size": _sequence,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _typed_tensor,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _of_type,
    "torch.serialization._get_layout": _layout,
    **{
        f"{module}.{name}": build
        for module in ("builtins", "__builtin__")
        for name, build in (
            ("set", _items(set)),
            ("frozenset", _items(frozenset)),
            ("complex", _complex),
            ("dict", _mapping),
            ("list", lambda *items: list(_sequence(*items))),
            ("tuple", _sequence),
            ("bytearray", _bytes),
            ("bytes", _bytes),
        )
    },
}
_TENSORS = frozenset(
    name for name, build in FUNCTIONS.items() if build in (_tensor, _typed_tensor, _parameter)
)
KNOWN: dict[tuple[str, str], Builder | Kind] = {
    **{(name.rpartition(".")[0], name.rpartition(".")[2]): Builder(name, b) for name, b in FUNCTIONS.items()},
    **{
        (module, name): Kind(f"builtins.{name}")
        for module in ("builtins", "__builtin__")
        for name in ("int", "float", "str", "bool", "object", "slice", "range")
    },
}
"""What may be named, and what then takes its place."""
