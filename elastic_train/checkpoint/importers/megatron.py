"""Checkpoints of Megatron-core's `torch_dist`, indexed where they lie.

They are checkpoints of torch.distributed.checkpoint with three things of their own: keys
(`optimizer.state.<state>.<parameter>`, layers as the first dim of one tensor), objects that ranks hold
(`<key>/shard_<offset>_<shape>`), and, up to release 0.14, states in a folded shape: a block of the parameter
as one dim, which ranks share by ranges. What an object holds isn't restored, except the optimizer's numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from elastic_train.checkpoint.document import Json
from elastic_train.checkpoint.document import decode as decode_json
from elastic_train.checkpoint.dtypes import element
from elastic_train.checkpoint.importers.dcp import METADATA, BlockPlace, StoredPlaces, rows_of
from elastic_train.checkpoint.importers.dcp_metadata import Grid, Metadata, decode
from elastic_train.checkpoint.importers.foreign_document import (
    OptimizerState,
    ParameterGroup,
    document,
    plain,
)
from elastic_train.checkpoint.importers.imported import Imported, imported
from elastic_train.checkpoint.importers.pickle_free import Opaque
from elastic_train.checkpoint.importers.torch_file import open_file
from elastic_train.checkpoint.importers.windows import windows
from elastic_train.checkpoint.manifest import Row
from elastic_train.errors import ChecksumMismatch, FormatUnsupported
from elastic_train.geometry.box import Box
from elastic_train.geometry.layout import flat_range_boxes
from elastic_train.storage.fsspec_store import Options
from elastic_train.storage.store import Store

SETTINGS = "metadata.json"
POINTER = "latest_checkpointed_iteration.txt"
COMMON = "common.pt"
_STATE = re.compile(r"(?:.*\.)?optimizer\.state\.([^.]+)\.(.+)")
_BUCKET = re.compile(r"(?:.*\.)?optimizer\.distributed\.dp_group_idx_.*bucket_idx_.*")
_NUMBERS = re.compile(r"(?:.*\.)?optimizer\.distributed\.dp_group_idx_\d+\.optimizer/shard_.*")
_SHARD = re.compile(r"(.+)/shard_[\d.]*_[\d.]*")
MASTERS = ("fp32_param", "param")
"""Under which names the optimizer keeps the parameters that it updates."""


def is_megatron(store: Store, at: str) -> bool:
    """Whether a directory of torch.distributed.checkpoint files says that it is Megatron's.

    FormatUnsupported where it says that it is in another of Megatron's forms.
    """
    path = f"{at}{SETTINGS}"
    if not store.exists(path):
        return False
    said = decode_json(store.read(path), url=f"{store.url}/{path}")
    backend = said.get("sharded_backend") if isinstance(said, dict) else None
    if backend not in (None, "torch_dist"):
        raise FormatUnsupported(
            url=f"{store.url}/{path}",
            problem=f"it is in Megatron's form {backend!r}. Save it with `--ckpt-format torch_dist`.",
        )
    return backend == "torch_dist"


def directory(store: Store) -> str | None:
    """The directory that Megatron's pointer file names, None where there is none."""
    if not store.exists(POINTER):
        return None
    text = store.read(POINTER).decode(errors="replace").strip()
    if text != "release" and not (text.isdecimal() and len(text) < 12):
        raise ChecksumMismatch(
            url=f"{store.url}/{POINTER}", problem=f"it names {text[:40]!r}, which is no iteration."
        )
    return text if text == "release" else f"iter_{int(text):07d}"


def open_megatron(store: Store, at: str, options: Options | None = None) -> Imported:
    """Index the directory `at` of the store."""
    base = f"{at}/" if at else ""
    url = f"{store.url}/{at}" if at else store.url
    metadata = decode(store.read(base + METADATA), at=at, url=f"{store.url}/{base}{METADATA}")
    names = _named(metadata, url)
    numbers = {key: item for key, item in metadata.objects.items() if _NUMBERS.fullmatch(key)}
    common = {key: item for key, item in metadata.objects.items() if key.partition("/")[0] == "common_state"}
    items = {f"{k} {n}": b.item for k, grid in metadata.tensors.items() for n, b in enumerate(grid.blocks)}
    opened = windows(store, items | numbers | common)
    places = StoredPlaces()
    rows: list[Row] = []
    for key, grid in metadata.tensors.items():
        name = names[key]
        if name is None:
            continue
        found = [places.find(opened[f"{key} {n}"], key, grid, block) for n, block in enumerate(grid.blocks)]
        if key in metadata.folded:
            rows += _unfolded(key, grid, metadata.folded[key], found, name, at, url)
        else:
            rows += rows_of(key, grid, found, name.tensor, name.state, at)
    trees = [open_file(opened[key].as_store(), item.file).tree for key, item in (common | numbers).items()]
    if store.exists(base + COMMON):
        trees.append(open_file(store, base + COMMON).tree)
    return imported(
        store,
        at,
        rows,
        _document(metadata, names, trees, set(numbers) | set(common)),
        aliases={},
        options=options,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Name:
    tensor: str
    state: str


def _named(metadata: Metadata, url: str) -> dict[str, _Name | None]:
    """What each key is; None for a copy in lower precision of what the optimizer keeps."""
    names: dict[str, _Name | None] = {}
    for key in metadata.tensors:
        if _BUCKET.fullmatch(key):
            raise FormatUnsupported(
                url=url,
                problem=f"{key} is a bucket of all parameters, in an order that only the plan of that run "
                "knows. Save it once with `--dist-ckpt-optim-fully-reshardable`.",
            )
        found = _STATE.fullmatch(key)
        if found is None:
            names.setdefault(key, _Name(tensor=key, state="param"))
        elif found[2] not in metadata.tensors:
            raise ChecksumMismatch(
                url=url, problem=f"{key} is there without {found[2]}, which it belongs to."
            )
        elif found[1] in MASTERS:
            names[found[2]] = None
            names[key] = _Name(tensor=found[2], state="param")
        else:
            names[key] = _Name(tensor=found[2], state=found[1])
    return names


def _unfolded(
    key: str, grid: Grid, shape: tuple[int, ...], places: list[BlockPlace], name: _Name, at: str, url: str
) -> Iterator[Row]:
    """Ranges of blocks as boxes of the tensor: the last dim of `grid` runs over a block's elements."""
    parts, inner = grid.shape[:-1], grid.shape[-1]
    local = tuple(n // max(1, p) for n, p in zip(shape, parts, strict=False))
    whole = tuple(n * p for n, p in zip(local, parts, strict=False))
    if len(parts) != len(shape) or whole != shape or math.prod(local) != inner:
        raise ChecksumMismatch(url=url, problem=f"{key} {list(grid.shape)} isn't {list(shape)} folded.")
    item = element(grid.dtype, url=url).bytes
    for block, place in zip(grid.blocks, places, strict=True):
        *number, start = block.box.offsets
        if place.strides is not None or any(n != 1 for n in block.box.sizes[:-1]):
            raise ChecksumMismatch(url=url, problem=f"{key} isn't in ranges of one block each.")
        byte = block.item.start + place.start
        for box in flat_range_boxes(local, start, start + block.box.sizes[-1]):
            offsets = tuple(o + n * size for o, n, size in zip(box.offsets, number, local, strict=True))
            yield Row(
                tensor=name.tensor,
                state=name.state,
                dtype=grid.dtype,
                shape=shape,
                box=Box(offsets, box.sizes),
                file=block.item.file.removeprefix(f"{at}/") if at else block.item.file,
                byte_offset=byte,
            )
            byte += box.numel * item


def _document(
    metadata: Metadata, names: Mapping[str, _Name | None], trees: list[Any], read: set[str]
) -> dict[str, Json]:
    facts: dict[str, Json] = {}
    groups: list[Mapping[str, Any]] = []
    steps: list[Any] = []
    for tree in trees:
        for part in _mappings(tree):
            groups += [g for g in part.get("param_groups") or () if isinstance(g, Mapping)]
            steps += [
                part[word] for word in ("common_step", "step") if isinstance(part.get(word), int | float)
            ]
            for word in ("iteration", "checkpoint_version", "opt_param_scheduler", "args"):
                value = part.get(word)
                kept, _ = plain(value.state if isinstance(value, Opaque) else value)
                if kept is not None:
                    facts.setdefault(word, kept)
    steps += [g["step"] for g in groups if isinstance(g.get("step"), int | float)]
    states = sorted({(n.tensor, n.state) for n in names.values() if n is not None and n.state != "param"})
    trained = sorted({tensor for tensor, _ in states})
    objects = sorted({(_SHARD.fullmatch(k) or [k, k])[1] for k in metadata.objects if k not in read})
    lost = [f"{key}: an object of Megatron's ranks" for key in objects]
    if trained:
        lost.append("which parameters are in which of the optimizer's groups: the job's own code says")
    else:
        lost.append("the optimizer: the checkpoint has none, and which parameters are trained isn't known")
    iteration = facts.get("iteration")
    number = {"value": float(steps[0]), "dtype": "float32"} if steps else None
    facts["param_groups"] = plain(groups)[0]
    return document(
        step=iteration if isinstance(iteration, int) else None,
        aliases={},
        optimizer=OptimizerState(
            groups=(ParameterGroup(params=tuple(trained), hyperparameters={}),) if trained else (),
            scalars={tensor: {"step": number} for tensor in trained} if number else {},
            states=tuple(states),
        ),
        system="Megatron-core torch_dist",
        facts=facts,
        not_restored=lost,
    )


def _mappings(tree: Any, depth: int = 4) -> Iterator[Mapping[Any, Any]]:
    """The tree and what it is made of, a few levels down: chained optimizers are numbered."""
    if isinstance(tree, Mapping):
        yield tree
    values = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, list) else ()
    for value in values if depth else ():
        yield from _mappings(value, depth - 1)
