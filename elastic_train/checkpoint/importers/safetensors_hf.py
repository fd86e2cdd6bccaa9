"""Weights of Hugging Face directories: safetensors or `.bin`, one file, several under an index, or the blocks
that ranks of torch.distributed.checkpoint wrote.

Every tensor becomes the state `param`; a specification says which are buffers. What Trainer and Accelerate
keep beside the weights is read too (trainer_state.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic_train.checkpoint.document import Json
from elastic_train.checkpoint.importers.foreign_document import document, in_short
from elastic_train.checkpoint.importers.foreign_rows import whole_row
from elastic_train.checkpoint.importers.full_optimizer import Parameters
from elastic_train.checkpoint.importers.full_pt import aliases_in, is_state_dict, model_in
from elastic_train.checkpoint.importers.imported import Imported, imported
from elastic_train.checkpoint.importers.safetensors_header import Header, read_header
from elastic_train.checkpoint.importers.side_by_side import each
from elastic_train.checkpoint.importers.torch_file import open_files
from elastic_train.checkpoint.importers.trainer_state import beside_weights
from elastic_train.checkpoint.importers.weight_files import (
    SAFE,
    WeightFiles,
    ambiguous,
    is_series,
    weight_files,
)
from elastic_train.checkpoint.language.pattern import near
from elastic_train.checkpoint.manifest import Row
from elastic_train.errors import ChecksumMismatch, FormatUnsupported, FragmentMissing, NoCheckpoint
from elastic_train.geometry.box import Box
from elastic_train.storage.fsspec_store import Options
from elastic_train.storage.store import Store

CONFIG = "config.json"
BLOCKS = "DCP_SHARDING_INFO"
"""Where a rank's file says at which offsets its blocks lie."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Rows of parameters; `parameters` are what an optimizer may have stepped."""

    rows: Sequence[Row]
    parameters: Parameters
    aliases: Mapping[str, str]
    lost: Sequence[str]
    assumed: Sequence[str]


def open_hugging_face(
    store: Store, at: str, options: Options | None = None, *, names: Sequence[str] | None = None
) -> Imported:
    """Index the directory `at` of the store, or the one safetensors file that it is."""
    if at.endswith(SAFE):
        at, _, name = at.rpartition("/")
        there: list[str] = []
        files = WeightFiles(names=[name], suffix=SAFE, listed=None, beside=())
    else:
        there = store.names(at)
        found = weight_files(store, at, there)
        if found is None:
            raise NoCheckpoint(url=f"{store.url}/{at}", problem="there are no weights here.")
        files = found
    weights = _safe(store, at, files) if files.suffix == SAFE else _torch(store, at, files)
    beside = beside_weights(store, at, there, weights.parameters, weights.aliases, names=names)
    said = document(
        step=beside.step,
        aliases=weights.aliases,
        optimizer=beside.optimizer,
        system="Hugging Face",
        facts={"config": _config(store, at), **beside.facts},
        not_restored=in_short(
            [
                *weights.lost,
                *beside.lost,
                *(f"{name}: other weights, which nothing says are of this model" for name in files.beside),
            ]
        ),
        assumed=[*weights.assumed, *beside.assumed],
    )
    rows = [*weights.rows, *beside.rows]
    return imported(store, at, rows, said, aliases=weights.aliases, options=options)


def is_hugging_face(store: Store, at: str) -> bool:
    """Whether there are weights in a directory under names that Hugging Face gives."""
    return weight_files(store, at, store.names(at)) is not None


def _path(at: str, name: str) -> str:
    return f"{at}/{name}" if at else name


def _safe(store: Store, at: str, files: WeightFiles) -> Weights:
    url = f"{store.url}/{at}".rstrip("/")
    paths = list(files.names)
    found = each(store, lambda path: read_header(store, _path(at, path)), paths)
    headers = dict(zip(paths, found, strict=True))
    unlisted = _check_map(headers, files.listed, url)
    ranks = all(BLOCKS in header.words for header in headers.values())
    if files.listed is None and len(paths) > 1 and not ranks:
        tensors = [t for header in headers.values() for t in header.tensors]
        if not is_series(paths) or len(set(tensors)) != len(tensors):
            raise ambiguous(url, paths)
    rows, copies = _rows(headers, files.listed, url)
    assumed = [
        f"{n} blocks are in the files of several ranks: the first file's are read" for n in (copies,) if n
    ]
    if files.listed is None and len(paths) > 1 and not ranks:
        assumed.append(f"{len(paths)} files are the parts of one model, by their names: there is no index")
    return Weights(
        rows=rows,
        parameters=Parameters(shapes={row.tensor: row.shape for row in rows}),
        aliases={},
        lost=[f"{name}: no file should hold it by the index" for name in unlisted],
        assumed=assumed,
    )


def _torch(store: Store, at: str, files: WeightFiles) -> Weights:
    """Weights in files of torch.save, whose state dicts follow the model's own order."""
    url = f"{store.url}/{at}".rstrip("/")
    opened = open_files(store, [_path(at, name) for name in files.names])
    rows: list[Row] = []
    shapes: dict[str, tuple[int, ...]] = {}
    aliases: dict[str, str] = {}
    lost: list[str] = []
    assumed: list[str] = []
    for name in files.names:
        file = opened[_path(at, name)]
        if not is_state_dict(file.tree):
            raise FormatUnsupported(url=file.url, problem="it holds no model's state dict.")
        wanted = {
            k: v for k, v in file.tree.items() if files.listed is None or files.listed.get(k, name) == name
        }
        model = model_in(file, wanted)
        if strange := sorted(model.tensors.keys() & shapes.keys()):
            raise ambiguous(f"{url} ({strange[0]})", files.names)
        same = aliases_in(model.tensors, set())
        aliases |= same
        shapes |= {t: s for t, s in model.shapes.items() if t not in same}
        rows += [whole_row(file, name, t, "param", r) for t, r in model.tensors.items() if t not in same]
        lost += model.lost
        assumed += [line for line in model.wrappers.assumed if line not in assumed]
    missing = sorted((files.listed or {}).keys() - shapes.keys() - aliases.keys())
    if missing and not assumed:
        raise FragmentMissing(
            url=url, problem=f"{(files.listed or {})[missing[0]]} should hold {missing[0]} and doesn't."
        )
    known = Parameters(shapes=shapes, in_order=True, why="the weights in the file")
    return Weights(rows=rows, parameters=known, aliases=aliases, lost=lost, assumed=assumed)


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


def _rows(headers: Mapping[str, Header], listed: Mapping[str, str] | None, url: str) -> tuple[list[Row], int]:
    """The rows, and how many blocks were left out because another rank wrote the same one."""
    places: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for file, header in headers.items():
        blocks = _blocks(header, f"{url}/{file}")
        for tensor, stored in header.tensors.items():
            if listed is None or listed.get(tensor) == file:
                offsets = blocks[tensor] if blocks else (0,) * len(stored.shape)
                places.setdefault(tensor, []).append((file, offsets))
    rows: list[Row] = []
    for tensor, found in places.items():
        rows += _of_tensor(headers, tensor, found)
    return rows, sum(map(len, places.values())) - len(rows)


def _of_tensor(
    headers: Mapping[str, Header], tensor: str, found: Sequence[tuple[str, tuple[int, ...]]]
) -> Iterator[Row]:
    boxes = [Box(offsets, headers[file].tensors[tensor].shape) for file, offsets in found]
    shape = _shape(boxes)
    seen: set[Box] = set()
    for (file, _), box in zip(found, boxes, strict=True):
        stored = headers[file].tensors[tensor]
        if box in seen:
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
        blocks = {tensor: tuple(info[tensor]["saved_offsets"]) for tensor in header.tensors}
        for tensor, offsets in blocks.items():
            whole = len(offsets) == len(header.tensors[tensor].shape)
            if not whole or not all(type(n) is int and 0 <= n < 2**62 for n in offsets):
                raise ValueError(f"{tensor} at {offsets!r:.80}")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ChecksumMismatch(url=url, problem=f"{BLOCKS} can't be read ({error}).") from error
    return blocks


def _shape(boxes: Sequence[Box]) -> tuple[int, ...]:
    """Blocks don't say how large the tensor is; those that tile it end where it ends."""
    ends = [[o + n for o, n in zip(b.offsets, b.sizes, strict=True)] for b in boxes]
    return tuple(max(column) for column in zip(*ends, strict=True))


def _config(store: Store, at: str) -> Json:
    if not store.exists(_path(at, CONFIG)):
        return None
    try:
        return json.loads(store.read(_path(at, CONFIG)))
    except (ValueError, RecursionError):
        return None
