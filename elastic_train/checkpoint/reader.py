"""Read a checkpoint: any box of any tensor, exactly the pages that hold it, each verified."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

import numpy as np

from elastic_train.checkpoint.checksums import digest
from elastic_train.checkpoint.commit import MANIFEST, STATE, check_aliases, tensors_of
from elastic_train.checkpoint.document import Json, StateFile
from elastic_train.checkpoint.dtypes import ELEMENTS
from elastic_train.checkpoint.fetch import Files, fetch
from elastic_train.checkpoint.importers.detect import import_checkpoint, is_file
from elastic_train.checkpoint.importers.openable import what_to_open
from elastic_train.checkpoint.lazy_arrays import Array, States, TensorInfo
from elastic_train.checkpoint.manifest import Manifest
from elastic_train.checkpoint.ranges import RangeIndex, Request
from elastic_train.checkpoint.resharding import kinds_of
from elastic_train.checkpoint.run_directory import CHECKPOINTS, RunDirectory
from elastic_train.checkpoint.validate.files import recorded_roots
from elastic_train.checkpoint.views import View, check_views
from elastic_train.errors import CheckpointDeleted, ChecksumMismatch, NoCheckpoint, TensorMismatch
from elastic_train.geometry.box import Box
from elastic_train.geometry.fragments import Fragments
from elastic_train.geometry.state_layout import Kind
from elastic_train.recovery.evidence import Stored
from elastic_train.storage.fsspec_store import Options, is_local, open_store
from elastic_train.storage.store import Store


def open_checkpoint(
    url: str,
    *,
    options: Options | None = None,
    names: Sequence[str] | None = None,
    allow_roots: Sequence[str] = (),
) -> Checkpoint:
    """The newest checkpoint of a run, the one in a checkpoint's directory, or another system's.

    `names` are the optimizer's parameters in its order, for another system's checkpoint that only has numbers
    for them. A directory inside a run must be in the run's log; one that was copied out of it stands for
    itself. Files that it names elsewhere are read under `allow_roots` alone, or where the run recorded it at
    an import.
    """
    checkpoint = _open(url, options, names)
    checkpoint.files.places.allow(allow_roots)
    return checkpoint


def _open(url: str, options: Options | None, names: Sequence[str] | None) -> Checkpoint:
    parent, _, name = url.rstrip("/").rpartition("/")
    store = open_store(url, options=options)
    if store.exists(MANIFEST):
        top, _, middle = parent.rpartition("/")
        if middle != CHECKPOINTS:
            return Checkpoint.open(open_store(parent or "/", options=options), name, options=options)
        run = RunDirectory(open_store(top or "/", options=options))
        for stored in run.commits():
            if stored.path == f"{CHECKPOINTS}/{name}":
                return Checkpoint.of(run, stored, options=options)
        raise NoCheckpoint(url=url, problem=f"it was never committed, or was removed. Open {top} instead.")
    if not is_local(url) or not is_file(url, options=options):  # objects with names inside it may be a run
        newest = Checkpoint.newest(RunDirectory(store), options=options)
        if newest is not None:
            return newest
    foreign = import_checkpoint(url, options=options, names=names)
    if foreign is None:
        raise NoCheckpoint(url=url, problem=f"nothing was committed here. {what_to_open(store, url)}")
    return Checkpoint(foreign.files, foreign.manifest, foreign.state)


class Checkpoint(Mapping[str, States]):
    """A committed checkpoint, open for reading. `checkpoint[fqn][state][0:128]` reads just that.

    Safe to use from several threads. `tensors` lists neither aliases nor views; every method takes them.
    """

    def __init__(self, files: Files, manifest: Manifest, state: StateFile) -> None:
        self.files, self.manifest = files, manifest
        self.document: Mapping[str, Json] = state.document
        self.aliases: Mapping[str, str] = state.aliases
        self._state = state
        self.tensors: Mapping[tuple[str, str], TensorInfo] = tensors_of(manifest)
        self._index = RangeIndex(manifest, url=files.url)
        self._states: dict[str, dict[str, TensorInfo]] = {}
        for (tensor, state_name), info in self.tensors.items():
            self._states.setdefault(tensor, {})[state_name] = info
        self.views: Mapping[str, View] = {name: View.from_json(v) for name, v in state.views.items()}
        check_views(self.views, self.tensors, url=files.url)
        for name, view in self.views.items():
            parts = {s: view.info(info) for s, info in self._states[view.of].items()}
            self._states[name] = {s: info for s, info in parts.items() if info is not None}

    @classmethod
    def open(
        cls,
        store: Store,
        directory: str,
        *,
        manifest_hash: str | None = None,
        options: Options | None = None,
        kept: Callable[[], bool] = lambda: True,
        siblings: str | None = None,
    ) -> Checkpoint:
        """Open a directory of the store; with `manifest_hash`, from the commit log, exactly what was
        committed.

        `options` open foreign files that the manifest may point at; `kept` says whether the run still keeps
        it; `siblings` is the directory of the run's checkpoints, where it is opened as one of a run.
        """
        files = Files(store, directory, options=options, kept=kept, siblings=siblings)
        table = files.load(MANIFEST)
        if manifest_hash is not None and digest(table) != manifest_hash:
            problem = f"{MANIFEST} isn't the one that was committed. Use an older checkpoint."
            raise ChecksumMismatch(url=files.url, problem=problem)
        manifest = Manifest.decode(table, url=files.url)
        state = files.load(STATE)
        if digest(state) != manifest.extra.get("state_hash"):
            raise ChecksumMismatch(
                url=files.url,
                problem=f"{STATE} isn't the one that {MANIFEST} names. Use an older checkpoint.",
            )
        said = StateFile.decode(state, url=files.url)
        manifest.check_tiling(url=files.url)
        check_aliases(manifest, said.aliases, url=files.url)
        if siblings is not None:
            files.places.allow(recorded_roots(manifest.extra.get("roots"), run=store.url, url=files.url))
        return cls(files, manifest, said)

    @classmethod
    def of(cls, run: RunDirectory, stored: Stored, *, options: Options | None = None) -> Checkpoint:
        """A checkpoint of the run's commit log, if its manifest is the committed one."""
        record = run.record(stored)
        return cls.open(
            run.store,
            record.path,
            manifest_hash=record.manifest_hash,
            options=options,
            kept=lambda: run.keeps(stored),
            siblings=CHECKPOINTS,
        )

    @classmethod
    def newest(cls, run: RunDirectory, *, options: Options | None = None) -> Checkpoint | None:
        """The newest of the run's commit log while others may commit and delete; None if none ever was."""
        while (stored := run.newest()) is not None:
            with suppress(CheckpointDeleted):  # a newer one was committed since
                return cls.of(run, stored, options=options)
        return None

    @property
    def url(self) -> str:
        return self.files.url

    def fragments(self) -> Fragments:
        """The boxes that are stored, as columns."""
        return self.manifest.fragments

    def kinds(self) -> Mapping[tuple[str, str], Kind]:
        """How each state of the optimizer is cut with its parameter; typed errors where that can't be."""
        return kinds_of(self.document, self.tensors, url=self.url)

    def whole(self) -> Fragments:
        """One box per tensor and state: all of it."""
        return Fragments.of(
            (tensor, state, info.dtype, info.shape, Box.whole(info.shape))
            for (tensor, state), info in self.tensors.items()
        )

    def info(self, tensor: str, state: str) -> TensorInfo:
        """Dtype and shape, or TensorMismatch with the names that are near."""
        found = self._states.get(self.aliases.get(tensor, tensor), {}).get(state)
        if found is None:
            hint = self._hint(tensor, (t for t, known in self._states.items() if state in known))
            raise TensorMismatch(url=self.url, problem=f"it has no {tensor} ({state}){hint}")
        return found

    @staticmethod
    def _hint(tensor: str, known: Iterable[str]) -> str:
        near = difflib.get_close_matches(tensor, list(known))
        return f". Did you mean {' or '.join(near)}?" if near else "."

    def read(self, tensor: str, state: str, box: Box | None = None) -> Array:
        """The elements of a box, or all of the tensor."""
        return self.read_many([(tensor, state, box or Box.whole(self.info(tensor, state).shape))])[0]

    def read_many(self, requests: Sequence[Request], *, into: Sequence[Array] | None = None) -> list[Array]:
        """One array per request, of the box's sizes, all fetched together.

        New arrays, or those of `into`: of the same sizes, with items of as many bytes, any strides.
        ChecksumMismatch and FragmentMissing name file, tensor and elements; `into` is then partly filled.
        CheckpointDeleted if the run deleted it meanwhile.
        """
        wanted = [(self.aliases.get(t, t), s, b) for t, s, b in requests]
        kinds = [ELEMENTS[self.info(tensor, state).dtype].numpy for tensor, state, _ in wanted]
        stored = [part for request in wanted for part in self._stored(request)]
        requested = [(tensor, state, box) for tensor, state, box, _ in stored]
        reads = self._index.reads(requested, large=self.files.check_room)
        if into is None:
            outputs: list[Array] = [np.empty(r[2].sizes, dtype=k) for r, k in zip(wanted, kinds, strict=True)]
        else:
            outputs = [array.view(kind) for array, kind in zip(into, kinds, strict=True)]
            assert all(array.shape == r[2].sizes for array, r in zip(outputs, wanted, strict=True))
        whole = (o for o, request in zip(outputs, wanted, strict=True) for _ in self._stored(request))
        places = [self._part(o, part) for o, part in zip(whole, stored, strict=True)]
        fetch(self.files, reads, requested, places)
        return outputs

    def _stored(self, request: Request) -> Sequence[tuple[str, str, Box, tuple[View, Box] | None]]:
        """A request for a view as requests for what is stored, each with its view and its place in that."""
        tensor, state, box = request
        view = self.views.get(tensor)
        if view is None:
            return [(tensor, state, box, None)]
        return [(view.of, state, part, (view, place)) for part, place in view.parts(box)]

    @staticmethod
    def _part(output: Array, stored: tuple[str, str, Box, tuple[View, Box] | None]) -> Array:
        """The part of an output that a stored request fills."""
        if stored[3] is None:
            return output
        view, place = stored[3]
        return (np.expand_dims(output, view.dim) if view.single else output)[place.slices]

    def __getitem__(self, tensor: str) -> States:
        states = self._states.get(self.aliases.get(tensor, tensor))
        if states is None:
            raise KeyError(f"{self.url} has no tensor {tensor!r}{self._hint(tensor, self._states)}")
        return States(states, lambda state, box: self.read(tensor, state, box))

    def __iter__(self) -> Iterator[str]:
        yield from self._states
        yield from self.aliases

    def __len__(self) -> int:
        return len(self._states) + len(self.aliases)
