"""Hugging Face directories: one safetensors file, several under an index, or the blocks that ranks of
torch.distributed.checkpoint wrote.

Only weights are in them: every tensor becomes the state `param`; a specification says which are buffers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from elastic_train.checkpoint.document import Json
from elastic_train.checkpoint.importers.foreign_document import OptimizerState, document
from elastic_train.checkpoint.importers.imported import Imported, imported
from elastic_train.checkpoint.importers.safetensors_header import Header, read_header
from elastic_train.checkpoint.language.pattern import near
from elastic_train.checkpoint.manifest import Row
from elastic_train.errors import ChecksumMismatch, FragmentMissing, NoCheckpoint, StorageError
from elastic_train.geometry.box import Box
from elastic_train.storage.fsspec_store import Options
from elastic_train.storage.store import Store, check_path

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
BLOCKS = "DCP_SHARDING_INFO"
"""Where a rank's file says at which offsets its blocks lie."""
THREADS = 8


def open_hugging_face(store: Store, at: str, options: Options | None = None) -> Imported:
    """Index the directory `at` of the store, or the one safetensors file that it is."""
    if at.endswith(".safetensors"):
        at, _, name = at.rpartition("/")
        listed = None
        paths = [name]
    else:
        listed = _weight_map(store, at)
        paths = sorted(set(listed.values())) if listed is not None else _files(store, at)
    with ThreadPoolExecutor(THREADS) as pool:
        headers = dict(zip(paths, pool.map(lambda p: read_header(store, _path(at, p)), paths), strict=True))
    unlisted = _check_map(headers, listed, f"{store.url}/{at}")
    said = document(
        step=None,
        aliases={},
        optimizer=OptimizerState(kind="none"),
        system="Hugging Face",
        facts={"config": _config(store, at)},
        not_restored=[f"{name}: no file should hold it by the index" for name in unlisted],
    )
    rows = _rows(headers, listed, f"{store.url}/{at}")
    return imported(store, at, rows, said, aliases={}, options=options)


def is_hugging_face(store: Store, at: str) -> bool:
    """Whether a directory has the names that Hugging Face gives."""
    return any(store.exists(_path(at, name)) for name in (SINGLE, INDEX)) or bool(_files(store, at))


def _path(at: str, name: str) -> str:
    return f"{at}/{name}" if at else name


def _files(store: Store, at: str) -> list[str]:
    """The safetensors files directly in the directory: a lone one, or those of ranks."""
    prefix = f"{at}/" if at else ""
    names = [p.removeprefix(prefix) for p in store.list(at)]
    found = [n for n in names if n.endswith(".safetensors") and "/" not in n]
    return [SINGLE] if SINGLE in found else found


def _weight_map(store: Store, at: str) -> dict[str, str] | None:
    """Tensor -> file, if there is an index."""
    if not store.exists(_path(at, INDEX)):
        return None
    url = f"{store.url}/{_path(at, INDEX)}"
    try:
        listed = json.loads(store.read(_path(at, INDEX)))["weight_map"]
        for file in set(listed.values()):
            check_path(file)
    except (ValueError, KeyError, TypeError, AttributeError, StorageError) as error:
        raise ChecksumMismatch(
            url=url, problem=f"the index can't be used ({error}). Copy it again."
        ) from error
    return listed


def _check_map(headers: Mapping[str, Header], listed: Mapping[str, str] | None, url: str) -> list[str]:
    """Every listed tensor is in its file; the names that are in files and not listed."""
    if not headers:
        raise NoCheckpoint(url=url, problem="there is no safetensors file here.")
    for tensor, file in (listed or {}).items():
        if tensor not in headers[file].tensors:
            problem = f"{file} should hold {tensor} and doesn't{near(tensor, headers[file].tensors)}."
            raise FragmentMissing(url=url, problem=problem)
    if listed is None:
        return []
    return sorted(t for f, h in headers.items() for t in h.tensors if listed.get(t) != f)


def _rows(headers: Mapping[str, Header], listed: Mapping[str, str] | None, url: str) -> Iterator[Row]:
    places: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for file, header in headers.items():
        blocks = _blocks(header, f"{url}/{file}")
        for tensor, stored in header.tensors.items():
            if listed is None or listed.get(tensor) == file:
                offsets = blocks[tensor] if blocks else (0,) * len(stored.shape)
                places.setdefault(tensor, []).append((file, offsets))
    for tensor, found in places.items():
        boxes = [Box(offsets, headers[file].tensors[tensor].shape) for file, offsets in found]
        shape = _shape(boxes)
        seen: set[Box] = set()
        for (file, _), box in zip(found, boxes, strict=True):
            stored = headers[file].tensors[tensor]
            if box in seen:  # ranks that hold the same block each write it
                continue
            seen.add(box)
            yield Row(
                tensor=tensor,
                state="param",
                dtype=stored.dtype,
                shape=shape,
                box=box,
                file=file,
                byte_offset=stored.start,
            )


def _blocks(header: Header, url: str) -> dict[str, tuple[int, ...]] | None:
    """Where a rank's blocks begin, if the file is a rank's."""
    text = header.words.get(BLOCKS)
    if text is None:
        return None
    try:
        info: dict[str, Any] = json.loads(text)
        return {tensor: tuple(info[tensor]["saved_offsets"]) for tensor in header.tensors}
    except (ValueError, KeyError, TypeError) as error:
        raise ChecksumMismatch(url=url, problem=f"{BLOCKS} can't be read ({error}).") from error


def _shape(boxes: Sequence[Box]) -> tuple[int, ...]:
    """Blocks don't say how large the tensor is; those that tile it end where it ends."""
    ends = [[o + n for o, n in zip(b.offsets, b.sizes, strict=True)] for b in boxes]
    return tuple(max(column) for column in zip(*ends, strict=True))


def _config(store: Store, at: str) -> Json:
    if not store.exists(_path(at, CONFIG)):
        return None
    try:
        return json.loads(store.read(_path(at, CONFIG)))
    except ValueError:
        return None
