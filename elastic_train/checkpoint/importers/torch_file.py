"""A file that `torch.save` wrote, opened by its index: its structure, and where its tensors' bytes are."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from elastic_train.checkpoint.dtypes import ELEMENTS, element
from elastic_train.checkpoint.importers.pickle_free import OddTensor, TensorRef, unpickle
from elastic_train.checkpoint.importers.side_by_side import each
from elastic_train.checkpoint.importers.zip_index import ZipIndex, damaged, read_index
from elastic_train.errors import ChecksumMismatch, FormatUnsupported
from elastic_train.storage.store import Store

SMALL = 4096
"""Bytes of a storage up to which it is read whole for one number in it."""
_RECORDS = ("data.pkl", "byteorder", "version", ".format_version")
_VERSIONS = range(1, 11)
"""File versions that torch reads; it writes 3."""
_DEEPSPEED = re.compile(r"(bf16_|fp16_)?(zero_pp_rank_\d+_)?mp_rank_\d+_(model|optim)_states|layer_\d+-.*")
_ATOMS = frozenset({"fp32", "exp_avg", "exp_avg_sq", "step"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFile:
    """`tree` is what was saved, with a `TensorRef` for each tensor."""

    store: Store
    path: str  # in the store
    url: str
    tree: Any
    starts: Mapping[str, int]  # storage -> its first byte in the file
    sizes: Mapping[str, int]
    sums: Mapping[str, int]  # 0 where none was computed

    def place(self, ref: TensorRef) -> int:
        """The byte of a tensor's first element; ChecksumMismatch where the tensor isn't all in the file."""
        if not all(ref.shape):
            return 0
        item = element(ref.dtype, url=self.url).bytes
        size = self.sizes.get(ref.storage.key)
        kind = ELEMENTS.get(ref.storage.dtype) if ref.storage.dtype else None
        if size is not None and kind is not None and ref.storage.numel * kind.bytes != size:
            said = f"{ref.storage.numel} elements of {ref.storage.dtype}"
            raise damaged(self.url, f"the storage {ref.storage.key} should have {said} and has {size} bytes")
        last = ref.offset + sum((n - 1) * s for n, s in zip(ref.shape, ref.strides, strict=True))
        if size is None or (last + 1) * item > size:
            raise damaged(self.url, f"a tensor of shape {ref.shape} reaches over the end of its storage")
        return self.starts[ref.storage.key] + ref.offset * item

    def scalar(self, ref: TensorRef) -> Any:
        """The value of a tensor with one element, read now, with all of its storage where that is small.

        What is in a document is never read again, so its sum is compared here.
        """
        assert all(n == 1 for n in ref.shape)
        kind = element(ref.dtype, url=self.url)
        key, place = ref.storage.key, self.place(ref)
        start, size = self.starts[key], self.sizes[key]
        if size > SMALL:
            start, size = place, kind.bytes
        data = self.store.read(self.path, start, size)
        whole = size == self.sizes[key] and start == self.starts[key]
        if whole and self.sums[key] and zlib.crc32(data) != self.sums[key]:
            raise ChecksumMismatch(
                url=self.url, problem=f"a number in it (data/{key}) isn't the one written. Copy it again."
            )
        return np.frombuffer(data, dtype=kind.numpy, count=1, offset=place - start)[0].item()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Contents:
    """What was read of a file: its index, its structure as it is pickled, the first bytes of its storages."""

    index: ZipIndex
    pickled: bytes
    starts: Mapping[str, int]


def open_file(store: Store, path: str) -> TorchFile:
    """Index one file. Nothing in it is run, and no tensor is read."""
    found = _contents(store, path)
    return _file(found, unpickle(found.pickled, url=found.index.url))


def open_files(store: Store, paths: Iterable[str]) -> dict[str, TorchFile]:
    """Several files side by side, by path. Those with the same structure, as ranks often write them, have one
    `tree`: nobody may change it.
    """
    paths = list(paths)
    contents = each(store, lambda path: _contents(store, path), paths)
    trees: dict[bytes, Any] = {}
    for found in contents:
        if found.pickled not in trees:
            trees[found.pickled] = unpickle(found.pickled, url=found.index.url)
    return {path: _file(own, trees[own.pickled]) for path, own in zip(paths, contents, strict=True)}


def _contents(store: Store, path: str) -> _Contents:
    index = read_index(store, path)
    url = index.url
    if "data.pkl" not in index.entries:
        problem = (
            "it is a TorchScript archive"
            if "code" in {n.partition("/")[0] for n in index.entries}
            else "no index"
        )
        raise FormatUnsupported(url=url, problem=f"{problem}: it is no file that torch.save writes.")
    _check_name(index.root, path, url)
    records = index.read(_RECORDS)
    _check_versions(records, url)
    storages = [n for n, e in index.entries.items() if n.startswith("data/") and e.size]
    return _Contents(index=index, pickled=records["data.pkl"], starts=index.starts(storages))


def _file(found: _Contents, tree: Any) -> TorchFile:
    index = found.index
    return TorchFile(
        store=index.store,
        path=index.path,
        url=index.url,
        tree=tree,
        starts={name.removeprefix("data/"): start for name, start in found.starts.items()},
        sizes={name.removeprefix("data/"): index.entries[name].size for name in found.starts},
        sums={name.removeprefix("data/"): index.entries[name].crc for name in found.starts},
    )


def check_readable(value: Any, what: str, *, url: str) -> None:
    """FormatUnsupported where a value is a tensor that can't be read from where it lies; `what` names it."""
    if isinstance(value, OddTensor):
        raise FormatUnsupported(
            url=url, problem=f"{what} is {value.what}, which can't be read in place. {value.remedy}"
        )
    if isinstance(value, TensorRef) and value.dtype not in ELEMENTS:
        raise FormatUnsupported(
            url=url,
            problem=f"{what} is of dtype {value.dtype}, which can't be stored. Cast it to one of "
            f"{', '.join(ELEMENTS)}.",
        )


def is_contiguous(ref: TensorRef) -> bool:
    """Whether the elements follow one another in row-major order."""
    step = 1
    for size, stride in zip(reversed(ref.shape), reversed(ref.strides), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def byte_strides(ref: TensorRef) -> tuple[int, ...] | None:
    """As a manifest row has them."""
    if is_contiguous(ref) or not all(ref.shape):
        return None
    return tuple(s * ELEMENTS[ref.dtype].bytes for s in ref.strides)


def _check_name(root: str, path: str, url: str) -> None:
    """torch.save keeps the name a file was written under: files that changed places are found by it."""
    name = path.rpartition("/")[2].removesuffix(".pt")
    known = {name, root} <= _ATOMS or (_DEEPSPEED.fullmatch(root) and _DEEPSPEED.fullmatch(name))
    if known and name != root:
        raise ChecksumMismatch(
            url=url,
            problem=f"it was written as {root}.pt. Give the files of the checkpoint their own names again.",
        )


def _check_versions(records: Mapping[str, bytes], url: str) -> None:
    order = records.get("byteorder", b"little").strip()
    if order != b"little":
        raise FormatUnsupported(url=url, problem=f"its numbers are {order.decode(errors='replace')}-endian.")
    for name, known in (("version", _VERSIONS), (".format_version", range(1, 2))):
        said = records.get(name, b"1").strip()
        if not said.isdigit() or int(said) not in known:
            raise FormatUnsupported(
                url=url,
                problem=f"its {name.removeprefix('.')} is {said.decode(errors='replace')}, this release "
                "reads up to "
                f"{known[-1]}. Upgrade elastic_train.",
            )
