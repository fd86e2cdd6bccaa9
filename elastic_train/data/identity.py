"""Identity of a data set: its length and a fingerprint of its contents, to recognise it at a resume."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import PurePath
from typing import Any
from uuid import UUID

import numpy as np

from elastic_train.data.numbered import NumberedSamples, numbered, read_in_order, tell_epoch
from elastic_train.data.seeding import Seeding, unseeded
from elastic_train.errors import ConfigError, DataMismatch

_SAID = (datetime.date, datetime.time, datetime.timedelta, Decimal, Fraction, Enum, PurePath, UUID, range)
"""Kinds of values that their repr says whole."""

SAMPLED = 16
"""Samples whose contents enter a fingerprint, spread evenly from the first to the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataIdentity:
    """What a run records of its data."""

    length: int
    fingerprint: str

    def require(self, now: DataIdentity) -> None:
        """Raise DataMismatch where the data set that is there now is another one."""
        if self.length != now.length:
            raise DataMismatch(
                field="dataset",
                problem=f"it has {now.length} samples, the run was started with {self.length}.",
                remedy="Restore the data, or start a new run under another name.",
            )
        if self.fingerprint != now.fingerprint:
            raise DataMismatch(
                field="dataset",
                problem=f"its {now.length} samples are not those that the run was started with: its files or "
                "preparation changed, or it draws from a generator of its own.",
                remedy="Restore the data and its preparation, draw by the number of the sample, or start a "
                "new run under another name.",
            )


def identify(dataset: NumberedSamples, *, seed: int = 0, seeding: Seeding = unseeded) -> DataIdentity:
    """Length and fingerprint of a data set; the same in every process and after a restart.

    The fingerprint covers what the source says of its files (`describe`) and up to `SAMPLED` samples, each
    loaded under its own seed, so that random augmentation does not change it.
    """
    dataset = numbered(dataset)
    length = len(dataset)
    tell_epoch(dataset, 0)
    digest = hashlib.blake2b(digest_size=16)
    describe = getattr(dataset, "describe", None)
    _absorb(digest, describe() if callable(describe) else None)
    for index in spread(dataset):
        with seeding(seed, 0, index):
            _absorb(digest, dataset[index])
    return DataIdentity(length=length, fingerprint=digest.hexdigest())


def spread(dataset: NumberedSamples) -> list[int]:
    """Numbers of samples from the first to the last, or the first ones of what is read in order."""
    length = len(dataset)
    if read_in_order(dataset):
        return list(range(min(SAMPLED, length)))
    return sorted({round(i * (length - 1) / (SAMPLED - 1)) for i in range(SAMPLED)} if length else ())


def check_repeatable(dataset: NumberedSamples, *, seed: int = 0, seeding: Seeding = unseeded) -> None:
    """ConfigError where a sample differs when it is read again, after others and in another order."""
    first: dict[int, str] = {}
    numbers = spread(dataset)
    tell_epoch(dataset, 0)
    for index in (*numbers, *reversed(numbers)):
        with seeding(seed, 0, index):
            found = digest_of(dataset[index])
        if first.setdefault(index, found) != found:
            raise unlike(f"sample {index} differs when it is read again")


def unlike(problem: str) -> ConfigError:
    """Samples that are no function of their number: a run could neither resume nor grow with them."""
    return ConfigError(
        field="task.dataset",
        problem=f"{problem}: it depends on a generator of its own, a clock, or what was read before.",
        remedy="Draw from the global generators of Python, numpy or torch, which are seeded for each sample, "
        "or make one in __getitem__ from the number: np.random.default_rng((seed, i)).",
    )


def fingerprint(dataset: NumberedSamples) -> str:
    """The fingerprint alone of a data set that draws no random numbers."""
    return identify(dataset).fingerprint


def digest_of(sample: object) -> str:
    """A fingerprint of one sample's contents."""
    digest = hashlib.blake2b(digest_size=16)
    _absorb(digest, sample)
    return digest.hexdigest()


def _absorb(digest: hashlib.blake2b, value: Any) -> None:
    """Add a value's contents, framed by type and length so that neighbours cannot run into each other."""
    parts = _parts(value)
    if parts is not None:
        _absorb_all(
            digest,
            f"tensor {value.layout} {value.dtype} {() if value.is_nested else tuple(value.shape)}",
            parts,
        )
        return
    array = _array(value)
    if array is not None and array.dtype != object:
        _frame(digest, f"array {array.dtype.str} {array.shape}", np.ascontiguousarray(array).tobytes())
    elif isinstance(value, Mapping):
        _absorb_all(
            digest, "mapping", (part for key in sorted(value, key=repr) for part in (key, value[key]))
        )
    elif isinstance(value, list | tuple | np.ndarray):
        _absorb_all(digest, "sequence", value)
    elif dataclasses.is_dataclass(value):
        _absorb_all(digest, type(value).__name__, (getattr(value, f.name) for f in dataclasses.fields(value)))
    elif isinstance(value, bytes | bytearray | memoryview):
        _frame(digest, "bytes", bytes(value))
    elif value is None or isinstance(value, str | bool | int | float | complex):
        _frame(digest, type(value).__name__, repr(value).encode())
    elif isinstance(value, set | frozenset):
        _absorb_all(digest, "set", sorted(value, key=repr))
    elif isinstance(value, _SAID):
        _frame(digest, type(value).__name__, repr(value).encode())
    else:  # its repr may hold an address
        _frame(digest, "object", type(value).__qualname__.encode())
        to_dict = getattr(value, "to_dict", None)  # graphs, frames
        if callable(to_dict) and not isinstance(value, type):
            _absorb(digest, to_dict())


def _parts(value: Any) -> Sequence[Any] | None:
    """What a tensor is made of whose elements do not lie side by side; None for anything else."""
    if not (hasattr(value, "is_nested") and hasattr(value, "layout")):
        return None
    if value.is_nested:
        return value.unbind()
    if value.is_meta:
        return ()
    if value.is_quantized:
        return (value.dequantize(),)
    match str(value.layout).removeprefix("torch.sparse_"):
        case "coo":
            whole = value.detach().coalesce()
            return (whole.indices(), whole.values())
        case "csr" | "bsr":
            return (value.crow_indices(), value.col_indices(), value.values())
        case "csc" | "bsc":
            return (value.ccol_indices(), value.row_indices(), value.values())
        case _:
            return None


def _array(value: Any) -> np.ndarray | None:
    """Arrays, tensors, images: whatever numpy can look at; torch is not imported to tell."""
    if hasattr(value, "detach") and hasattr(value, "is_floating_point"):
        tensor = value.detach().cpu()
        return np.asarray(tensor.double() if tensor.is_floating_point() else tensor)
    looks = hasattr(value, "__array__") or hasattr(value, "__array_interface__")
    return np.asarray(value) if looks else None


def _absorb_all(digest: hashlib.blake2b, kind: str, values: Iterable[Any]) -> None:
    parts = list(values)
    _frame(digest, kind, str(len(parts)).encode())
    for part in parts:
        _absorb(digest, part)


def _frame(digest: hashlib.blake2b, kind: str, data: bytes) -> None:
    digest.update(f"{kind} {len(data)}:".encode() + data)
