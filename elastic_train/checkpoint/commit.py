"""Assemble a checkpoint from its writers' parts: check them, then write the manifest and the state file.

Nothing here makes the checkpoint visible; that is one record in the commit log, written by
RunDirectory.commit.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from elastic_train.checkpoint.checksums import digest
from elastic_train.checkpoint.document import Json, StateFile
from elastic_train.checkpoint.lazy_arrays import TensorInfo
from elastic_train.checkpoint.manifest import Manifest
from elastic_train.checkpoint.resharding import recorded, required
from elastic_train.checkpoint.validate.files import encode_roots
from elastic_train.checkpoint.writer import WrittenPart
from elastic_train.errors import (
    AlreadyExists,
    ChecksumMismatch,
    FragmentMissing,
    StorageNotFound,
    TensorMismatch,
)
from elastic_train.geometry.coverage import untiled
from elastic_train.geometry.fragments import Fragments
from elastic_train.storage.store import Store

MANIFEST = "manifest.parquet"
STATE = "state.json"
THREADS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembled:
    """A complete checkpoint that nobody sees yet. Its hash covers the manifest and, through it, the state
    file.
    """

    directory: str
    manifest_path: str
    manifest_hash: str
    bytes: int


def assemble(
    store: Store,
    directory: str,
    parts: Sequence[WrittenPart],
    document: Mapping[str, Json],
    *,
    aliases: Mapping[str, str] | None = None,
    views: Mapping[str, Json] | None = None,
) -> Assembled:
    """Join the parts into a checkpoint, if their fragments tile every tensor; else FragmentMissing.

    `aliases` maps tied names to the names that hold the fragments, `views` names of parts to where they are.
    May be repeated, with later metrics too: what the first time said stays, and nothing is written again.
    """
    with ThreadPoolExecutor(THREADS) as pool:
        tables = list(pool.map(lambda part: _part(store, directory, part), parts))
    said = StateFile(document=document, aliases=aliases or {}, views=views or {})
    described = describe(store, directory, tables, said)
    return replace(described, bytes=described.bytes + sum(p.bytes for p in parts))


def describe(
    store: Store,
    directory: str,
    tables: Sequence[Manifest],
    said: StateFile,
    *,
    roots: Sequence[str] = (),
) -> Assembled:
    """Write the manifest of the joined tables, and beside it what is said, with the kinds of all states.

    Each is created once: an attempt may be committed already, by a controller that died before it said so.
    `roots` are the directories outside of the run in which it may name files.
    """
    url = f"{store.url}/{directory}"
    manifest = Manifest.concat(tables, url=url, extra={})
    check_coverage(manifest.fragments, url=url)
    check_aliases(manifest, said.aliases, url=url)
    document = recorded(said.document, tensors_of(manifest), url=url)
    state = replace(said, document=document, requires=required(document)).encode()
    state = _created(store, f"{directory}/{STATE}", state)
    _check_same_state(StateFile.decode(state, url=url).document, document, url=url)
    manifest.extra = {"state_hash": digest(state)}
    if roots:
        manifest.extra["roots"] = encode_roots(roots, run=store.url)
    wanted = manifest.encode()
    table = _created(store, f"{directory}/{MANIFEST}", wanted)
    if table != wanted:  # by another release of Arrow, the same rows may be other bytes
        there = Manifest.decode(table, url=url)
        if there.extra != manifest.extra or not there.table.equals(manifest.table):
            raise _another(url)
    return Assembled(
        directory=directory,
        manifest_path=f"{directory}/{MANIFEST}",
        manifest_hash=digest(table),
        bytes=len(state) + len(table),
    )


def _created(store: Store, path: str, data: bytes) -> bytes:
    """The object's bytes: these, unless there were others."""
    try:
        store.create(path, data)
    except AlreadyExists:
        return store.read(path)
    return data


def _check_same_state(there: Mapping[str, Json], wanted: Mapping[str, Json], *, url: str) -> None:
    if any(there.get(name) != wanted.get(name) for name in ("step", "state_digest")):
        raise _another(url)


def _another(url: str) -> ChecksumMismatch:
    return ChecksumMismatch(
        url=url, problem="it was assembled before, from other parts, and may be committed: it stays as it is."
    )


def tensors_of(manifest: Manifest) -> dict[tuple[str, str], TensorInfo]:
    """Dtype and shape of each tensor and state."""
    return {
        name: TensorInfo(dtype=dtype, shape=shape) for name, dtype, shape in zip(*manifest.kinds, strict=True)
    }


def check_coverage(fragments: Fragments, *, url: str) -> None:
    """The fragments tile every tensor, or FragmentMissing names tensor, state and box."""
    problem = untiled(fragments)
    if problem is not None:
        raise FragmentMissing(url=url, problem=f"{problem}. Use an older checkpoint, or save again.")


def check_aliases(manifest: Manifest, aliases: Mapping[str, str], *, url: str) -> None:
    """Each alias leads to a tensor with fragments and is none itself."""
    tensors = {tensor for tensor, _ in manifest.kinds[0]}
    for name, target in aliases.items():
        if target not in tensors or name in tensors:
            raise TensorMismatch(url=url, problem=f"the alias {name} of {target} doesn't lead to a tensor.")


def _part(store: Store, directory: str, part: WrittenPart) -> Manifest:
    """A part's manifest, if it is the one that was reported and all the data it names is there."""
    url = f"{store.url}/{directory}/{part.manifest}"
    try:
        data = store.read(f"{directory}/{part.manifest}")
    except StorageNotFound as error:
        raise FragmentMissing(url=url, problem=f"the part of writer {part.writer} is gone.") from error
    if digest(data) != part.digest:
        raise ChecksumMismatch(
            url=url, problem=f"the part of writer {part.writer} isn't the one it reported."
        )
    manifest = Manifest.decode(data, url=url)
    ends = np.array(manifest.table.column("byte_offset").to_numpy()) + manifest.fragments.nbytes
    files = np.array(manifest.strings("file"), dtype=object)
    for file in manifest.distinct("file"):
        end, path = int(ends[files == file].max()), posixpath.normpath(f"{directory}/{file}")
        if not store.exists(path) or store.size(path) < end:
            raise FragmentMissing(url=url, problem=f"{file} should have {end} bytes and is gone or shorter.")
    return manifest
