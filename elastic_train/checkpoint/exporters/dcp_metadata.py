"""The `.metadata` file of torch.distributed.checkpoint, as torch pickles its classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from elastic_train.checkpoint.exporters.pickled import Global, Instance, Pairs, PickledCall, pickled, size
from elastic_train.geometry.box import Box

_PACKAGE = "torch.distributed.checkpoint"
VERSION = "1.0.0"
_NOBODY = {"checkpoint_id": None, "save_id": None, "load_id": None, "modules": []}
Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPlace:
    """Where one block or object is."""

    box: Box
    dtype: str
    file: str
    start: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A tensor and its blocks."""

    dtype: str
    shape: tuple[int, ...]
    places: tuple[StoredPlace, ...]


def metadata(grids: Mapping[Path, Grid], objects: Mapping[Path, StoredPlace]) -> bytes:
    """The pickle; keys are the paths' parts joined by dots."""
    kinds: dict[str, Instance] = {_key(path): _tensor(grid) for path, grid in grids.items()}
    kinds |= {_key(path): Instance(_of("BytesStorageMetadata"), {}) for path in objects}
    places = [
        (_index(path, size(place.box.offsets), number), _info(place))
        for path, grid in grids.items()
        for number, place in enumerate(grid.places)
    ]
    places += [(_index(path, None, None), _info(place)) for path, place in objects.items()]
    return pickled(
        Instance(
            _of("Metadata"),
            {
                "state_dict_metadata": kinds,
                "planner_data": {_key(path): path for path in (*grids, *objects)},
                "storage_data": Pairs(places),
                "storage_meta": Instance(_of("StorageMeta"), _NOBODY),
                "version": VERSION,
            },
        )
    )


def _of(name: str) -> Global:
    return Global(f"{_PACKAGE}.metadata", name)


def _key(path: Path) -> str:
    return ".".join(map(str, path))


def _index(path: Path, offset: PickledCall | None, number: int | None) -> Instance:
    return Instance(_of("MetadataIndex"), {"fqn": _key(path), "offset": offset, "index": number})


def _tensor(grid: Grid) -> Instance:
    layout = PickledCall(Global("torch.serialization", "_get_layout"), ("torch.strided",))
    memory = PickledCall(_of("_MEM_FORMAT_ENCODING"), (0,))
    kind = (Global("torch", grid.dtype), layout, False, memory, False)
    properties = Instance(_of("TensorProperties"), kind)
    chunks = [
        Instance(_of("ChunkStorageMetadata"), {"offsets": size(p.box.offsets), "sizes": size(p.box.sizes)})
        for p in grid.places
    ]
    return Instance(
        _of("TensorStorageMetadata"), {"properties": properties, "size": size(grid.shape), "chunks": chunks}
    )


def _info(place: StoredPlace) -> Instance:
    return Instance(
        Global(f"{_PACKAGE}.filesystem", "_StorageInfo"),
        {"relative_path": place.file, "offset": place.start, "length": place.length},
    )
