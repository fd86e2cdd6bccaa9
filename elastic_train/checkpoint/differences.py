"""Compare two checkpoints tensor by tensor, whatever plan or system wrote them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from elastic_train.checkpoint.account import Name
from elastic_train.checkpoint.checksums import content_hash
from elastic_train.checkpoint.document import Json
from elastic_train.checkpoint.dtypes import ELEMENTS
from elastic_train.checkpoint.language.mapped import Readable
from elastic_train.checkpoint.language.operations import FLOATING
from elastic_train.checkpoint.lazy_arrays import Array
from elastic_train.checkpoint.reader import Checkpoint
from elastic_train.checkpoint.row_blocks import rows as row_blocks
from elastic_train.checkpoint.verify_rows import hashes

BLOCK = 32 << 20
"""Bytes of each checkpoint that are compared at once."""
OF_A_CHECKPOINT = frozenset({"foreign", "metrics", "lineage", "state_digest", "versions"})
"""What the document says of the file and not of the state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """`where` is a tensor with its state, or a place in the document."""

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


def differences(a: Readable, b: Readable) -> Iterator[Difference]:
    """All differences, tensor by tensor as they are read; equal hashes of equal fragments aren't read."""
    same = _same(a, b)
    for name in sorted({*a.tensors, *b.tensors}):
        where = f"{name[0]} ({name[1]})"
        if name not in b.tensors or name not in a.tensors:
            yield Difference(where=where, what=f"only in {'A' if name in a.tensors else 'B'}")
            continue
        one, other = a.tensors[name], b.tensors[name]
        if one != other:
            what = f"{one.dtype} {list(one.shape)} in A, {other.dtype} {list(other.shape)} in B"
            yield Difference(where=where, what=what)
        elif name not in same and (what := _contents(a, b, name)):
            yield Difference(where=where, what=what)
    if dict(a.aliases) != dict(b.aliases):
        yield Difference(where="aliases", what=f"{dict(a.aliases)} in A, {dict(b.aliases)} in B")
    if _trains(a) and _trains(b):
        yield from _documents(a.document, b.document)


def _trains(checkpoint: Readable) -> bool:
    """Whether it knows of training at all; files of weights alone have no step to differ in."""
    return (checkpoint.document.get("optimizer") or {}).get("class") != "none"


def _same(a: Readable, b: Readable) -> frozenset[Name]:
    """The tensors that are cut alike in both, with equal hashes of all fragments."""
    if not (isinstance(a, Checkpoint) and isinstance(b, Checkpoint)):
        return frozenset()
    one, other = _cuts(a), _cuts(b)
    return frozenset(name for name, cut in one.items() if other.get(name) == cut)


def _cuts(checkpoint: Checkpoint) -> dict[Name, bytes]:
    """A digest of how each tensor is cut and of the hashes of its fragments, if all have hashes."""
    table, fragments = checkpoint.manifest.columns()
    there, content = hashes(table)
    del table
    rows = np.concatenate([fragments.offsets, fragments.sizes, content.view(np.int64)], axis=1)
    columns = [fragments.offsets[:, dim] for dim in reversed(range(fragments.offsets.shape[1]))]
    order = np.lexsort((*columns, fragments.key)) if len(rows) else np.zeros(0, np.int64)
    key = fragments.key[order]
    bounds = np.searchsorted(key, np.arange(len(fragments.names) + 1))
    unknown = np.bincount(fragments.key[~there], minlength=len(fragments.names)) > 0
    rows = rows[order]
    found: dict[Name, bytes] = {}
    for number, name in enumerate(fragments.names):
        if not unknown[number]:
            dims = len(fragments.shapes[number])
            wide = fragments.offsets.shape[1]
            own = rows[bounds[number] : bounds[number + 1]]
            places = [*range(dims), *range(wide, wide + dims), 2 * wide, 2 * wide + 1]
            found[name] = content_hash(np.ascontiguousarray(own[:, places]).data)
    return found


def _contents(a: Readable, b: Readable, name: Name) -> str | None:
    """How the bits differ, None where they are equal."""
    info = a.tensors[name]
    count, largest = 0, 0.0
    first: tuple[int, ...] | None = None
    for box in row_blocks(info.shape, BLOCK // ELEMENTS[info.dtype].bytes):
        (one,) = a.read_many([(*name, box)])
        (other,) = b.read_many([(*name, box)])
        unequal = _unequal(one, other)
        if not unequal.any():
            continue
        count += int(unequal.sum())
        if first is None:
            place = np.unravel_index(int(np.argmax(unequal.reshape(-1))), unequal.shape)
            first = tuple(int(p) + o for p, o in zip(place, box.offsets, strict=True))
        if info.dtype in FLOATING:
            gap = np.abs(one[unequal].astype(np.float64) - other[unequal].astype(np.float64))
            largest = max(largest, float(np.nan_to_num(gap, nan=np.inf).max()))
    if first is None:
        return None
    note = f", by at most {largest:.3g}" if info.dtype in FLOATING else ""
    return f"{count} elements differ{note}, the first at {list(first)}"


def _unequal(one: Array, other: Array) -> npt.NDArray[np.bool_]:
    """Where the bits of the elements aren't equal."""
    item = one.dtype.itemsize
    a, b = (np.ascontiguousarray(x).reshape(-1).view(np.uint8).reshape(-1, item) for x in (one, other))
    return (a != b).any(axis=1).reshape(one.shape)


def _documents(a: Mapping[str, Json], b: Mapping[str, Json]) -> Iterator[Difference]:
    one, other = dict(_flat("", _of_state(a))), dict(_flat("", _of_state(b)))
    for place in sorted({*one, *other}):
        if place not in other or place not in one:
            yield Difference(where=place, what=f"only in {'A' if place in one else 'B'}")
        elif one[place] != other[place]:
            yield Difference(where=place, what=f"{one[place]!r} in A, {other[place]!r} in B")


def _of_state(document: Mapping[str, Json]) -> dict[str, Json]:
    """What the document says of the state: settings by parameter, whatever the groups and their order."""
    made = {k: v for k, v in document.items() if k not in OF_A_CHECKPOINT and k != "aliases"}
    if isinstance(made.get("trainable"), list):
        made["trainable"] = sorted(made["trainable"])
    if (optimizer := made.get("optimizer")) is not None:
        settings = {fqn: g["hyperparameters"] for g in optimizer["groups"] for fqn in g["params"]}
        made["optimizer"] = {
            **optimizer,
            "groups": settings,
            "states": sorted(map(list, optimizer["states"])),
        }
    return made


def _flat(place: str, value: Json) -> Iterator[tuple[str, Json]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flat(f"{place}.{key}" if place else str(key), item)
    else:
        yield place, list(value) if isinstance(value, tuple) else value
