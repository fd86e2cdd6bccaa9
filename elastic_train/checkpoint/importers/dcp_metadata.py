"""The `.metadata` file of torch.distributed.checkpoint: what is stored and where. Its pickle isn't run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from elastic_train.checkpoint.dtypes import ELEMENTS
from elastic_train.checkpoint.importers.pickle_builders import DIMS, MOST
from elastic_train.checkpoint.importers.pickle_free import Opaque, unpickle
from elastic_train.checkpoint.importers.windows import Item
from elastic_train.errors import ChecksumMismatch, FormatUnsupported, FragmentMissing, StorageError
from elastic_train.geometry.box import Box
from elastic_train.storage.store import check_path

_PACKAGE = "torch.distributed.checkpoint."
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata"
_FOLDED = "nd_reformulated_orig_global_shape"


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One stored block of a tensor."""

    box: Box
    item: Item


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A tensor: its dtype and shape as the metadata has them, and its blocks."""

    dtype: str
    shape: tuple[int, ...]
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadata:
    """By flat key. `paths` are the keys' parts as they were nested, where the file says so, `folded` the true
    shapes of tensors that Megatron stored in another one.
    """

    tensors: Mapping[str, Grid]
    objects: Mapping[str, Item]
    paths: Mapping[str, tuple[str | int, ...]]
    folded: Mapping[str, tuple[int, ...]]


def decode(data: bytes, *, at: str, url: str) -> Metadata:
    """The metadata; files are `at` a directory of the store. FormatUnsupported if they aren't to be had."""
    root = unpickle(data, url=url)
    if not (_is(root, "metadata.Metadata") or (isinstance(root, Opaque) and root.kind == _MEGATRON)):
        raise FormatUnsupported(url=url, problem="it is no metadata of torch.distributed.checkpoint.")
    try:
        places = {_place(k): _item(v, at, url) for k, v in root.get("storage_data").items()}
        tensors: dict[str, Grid] = {}
        objects: dict[str, Item] = {}
        for key, kind in root.get("state_dict_metadata").items():
            if _is(kind, "metadata.TensorStorageMetadata"):
                tensors[key] = _grid(key, kind, places, url)
            elif (key, None) in places:
                objects[key] = places[key, None]
            else:
                raise FragmentMissing(url=url, problem=f"it says nowhere where {key} is.")
        paths = {k: tuple(p) for k, p in (root.get("planner_data") or {}).items()}
        folded = {
            key: tuple(said[_FOLDED])
            for key, said in (root.get("mcore_data") or {}).items()
            if key in tensors and _FOLDED in said
        }
    except (AttributeError, TypeError, LookupError, ValueError) as error:
        raise ChecksumMismatch(url=url, problem=f"it isn't as torch writes it ({error}).") from error
    return Metadata(tensors=tensors, objects=objects, paths=paths, folded=folded)


def _is(value: object, kind: str) -> bool:
    return isinstance(value, Opaque) and value.kind == _PACKAGE + kind


def _place(index: Opaque) -> tuple[str, tuple[int, ...] | None]:
    offset = index.get("offset")
    return index.get("fqn"), None if offset is None else _numbers(offset)


def _numbers(value: Any) -> tuple[int, ...]:
    """A shape or a place."""
    if not isinstance(value, tuple | list) or len(value) > DIMS:
        raise ValueError(f"a shape that is a {type(value).__name__}")
    if not all(type(n) is int and 0 <= n < MOST for n in value) or math.prod(n for n in value if n) >= MOST:
        raise ValueError("a size that no tensor has")
    return tuple(value)


def _item(info: Opaque, at: str, url: str) -> Item:
    path, transforms = info.get("relative_path"), info.get("transform_descriptors")
    if transforms:
        raise FormatUnsupported(
            url=url,
            problem=f"{path} is stored through {', '.join(transforms)}, so nothing can be read in place.",
        )
    try:
        check_path(path)
    except StorageError as error:
        raise ChecksumMismatch(url=url, problem=f"it names the file {path!r}, which isn't inside.") from error
    start, length = _numbers((info.get("offset"), info.get("length")))
    return Item(file=f"{at}/{path}" if at else path, start=start, length=length)


def _grid(
    key: str, kind: Opaque, places: Mapping[tuple[str, tuple[int, ...] | None], Item], url: str
) -> Grid:
    state = kind.get("properties").state
    dtype = state[0] if isinstance(state, tuple) else state["dtype"]
    if dtype not in ELEMENTS:
        raise FormatUnsupported(
            url=url,
            problem=f"{key} is of dtype {dtype}, which can't be stored. Cast it to one of "
            f"{', '.join(ELEMENTS)}.",
        )
    return Grid(
        dtype=dtype,
        shape=_numbers(kind.get("size")),
        blocks=tuple(_blocks(key, kind.get("chunks"), places, url)),
    )


def _blocks(
    key: str, chunks: list[Opaque], places: Mapping[tuple[str, tuple[int, ...] | None], Item], url: str
) -> Iterator[Block]:
    seen: set[Box] = set()
    for chunk in chunks:
        box = Box(_numbers(chunk.get("offsets")), _numbers(chunk.get("sizes")))
        if box in seen or (not box.numel and len(chunks) > 1):
            continue
        seen.add(box)
        if (key, box.offsets) not in places:
            raise FragmentMissing(url=url, problem=f"it says nowhere where {key} {box} is.")
        yield Block(box=box, item=places[key, box.offsets])
