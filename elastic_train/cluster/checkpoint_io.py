"""Checkpoint I/O of workers and peer stores: write snapshots behind the step, read boxes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from elastic_train.checkpoint.merging import METRICS, STAGE, merged
from elastic_train.checkpoint.reader import Checkpoint
from elastic_train.checkpoint.references import References
from elastic_train.checkpoint.run_directory import RunDirectory, attempt_path
from elastic_train.checkpoint.snapshot import Snapshot
from elastic_train.checkpoint.writer import write_part
from elastic_train.cluster.messages import Writing
from elastic_train.config import RunSpec
from elastic_train.control.events import Event, PartWritten, SaveFailed
from elastic_train.errors import CheckpointError, StorageError
from elastic_train.geometry.digest import of_boxes
from elastic_train.geometry.fragments import Fragments
from elastic_train.recovery.evidence import Stored
from elastic_train.storage.bandwidth_cap import BandwidthCap
from elastic_train.storage.fsspec_store import child_url, open_store
from elastic_train.storage.store import Store

READ_BYTES = 64 * 2**20
"""How many bytes of a checkpoint a worker holds at once beside its shards."""


def document_path(directory: str, writer: int = 0) -> str:
    """Where the first writer, and that of each stage, leave scalars for the assembly of the checkpoint."""
    return f"{directory}/w{writer:05d}.json"


def read_document(store: Store, directory: str) -> dict[str, Any]:
    """The scalars of the whole state, from all that writers left."""
    found = [path for path in store.list(directory) if re.fullmatch(r"w\d{5}\.json", path.rpartition("/")[2])]
    return merged([json.loads(store.read(path)) for path in found])


class PartWriter:
    """Writes snapshots and says so. A save that fails is reported and never stops training."""

    def __init__(self, spec: RunSpec, post: Callable[[Event], None], *, clock: Callable[[], float]) -> None:
        self.store = open_store(child_url(spec.storage_path, spec.name))
        self._references = References(RunDirectory(self.store))
        self._post, self._clock = post, clock
        cap = spec.checkpoints.bandwidth
        self._spend = BandwidthCap(cap).spend if cap is not None else lambda size: None
        self._saving: dict[int, tuple[int, float]] = {}  # generation, and when storage last took bytes

    def save(self, snapshot: Snapshot) -> None:
        """On any thread but the training thread. Its buffer is released at the end."""
        began = self._clock()
        saving = id(snapshot)

        def spend(size: int) -> None:
            self._saving[saving] = (snapshot.generation, self._clock())
            self._spend(size)

        spend(0)
        directory = attempt_path(step=snapshot.step, generation=snapshot.generation)
        document = dict(snapshot.document)
        metrics = document.pop(METRICS, {})
        try:
            if snapshot.rank == 0 or STAGE in document:
                path = document_path(directory, snapshot.rank)
                self.store.write(path, json.dumps(document).encode())
            parameters = {tensor for tensor, state in snapshot.fragments.names if state == "param"}
            unchanged = self._references.unchanged(parameters - set(document["trainable"]))
            pieces = tuple(snapshot.pieces())
            part = write_part(self.store, directory, snapshot.rank, pieces, unchanged=unchanged, spend=spend)
            # This part's share of the digest of the whole state: every element is in one rank's part.
            arrays = [np.frombuffer(piece.bytes(), np.uint8) for piece in pieces]
            digest = of_boxes(snapshot.fragments, arrays)
        except (StorageError, CheckpointError) as error:
            self.failed(snapshot, str(error))
            return
        finally:
            del self._saving[saving]
            snapshot.buffer.release()
        self._post(
            PartWritten(
                at=0.0,
                generation=snapshot.generation,
                step=snapshot.step,
                rank=snapshot.rank,
                seconds=self._clock() - began,
                bytes=part.bytes,
                manifest=part.manifest,
                digest=part.digest,
                state_digest=digest,
                metrics=tuple(sorted(metrics.items())),
            )
        )

    def writing(self) -> Writing | None:
        """The newest generation that is being written here, if any is."""
        under_way = list(self._saving.values())
        newest = max((generation for generation, _ in under_way), default=0)
        last = max((at for generation, at in under_way if generation == newest), default=None)
        return None if last is None else Writing(generation=newest, seconds=self._clock() - last)

    def failed(self, snapshot: Snapshot, problem: str) -> None:
        """Say that a snapshot did not get to storage, and why."""
        problem = f"rank {snapshot.rank}: {problem}"
        self._post(SaveFailed(at=0.0, generation=snapshot.generation, step=snapshot.step, problem=problem))

    def open(self, stored: Stored) -> Checkpoint:
        return Checkpoint.of(RunDirectory(self.store), stored)


def read_in_batches(
    checkpoint: Checkpoint, needs: Fragments
) -> Iterator[tuple[Fragments, Sequence[np.ndarray]]]:
    """The bytes of every box, a bounded number of them at a time."""
    for boxes in batches(needs, READ_BYTES):
        yield boxes, read_boxes(checkpoint, boxes)


def read_in_turn(
    read: Callable[[int, int, Fragments], Sequence[np.ndarray]], generation: int, step: int, boxes: Fragments
) -> Iterator[np.ndarray]:
    """The bytes of each box of a state that is held, a bounded number of them read at a time."""
    for some in batches(boxes, READ_BYTES):
        yield from read(generation, step, some)


def batches(boxes: Fragments, size: int) -> Iterator[Fragments]:
    """The rows in order, about so many bytes at a time."""
    batch = np.cumsum(boxes.nbytes) // size
    for number in np.unique(batch):
        yield boxes.take(batch == number)


def read_boxes(checkpoint: Checkpoint, boxes: Fragments) -> Sequence[np.ndarray]:
    """The bytes of every box."""
    stored = [_as_stored(checkpoint, *name) for name in boxes.names]
    return checkpoint.read_many([(*stored[boxes.key[row]], boxes.box(row)) for row in range(len(boxes))])


def _as_stored(checkpoint: Checkpoint, tensor: str, state: str) -> tuple[str, str]:
    """A buffer that another system's checkpoint has among its parameters, as that has it."""
    stored = (checkpoint.aliases.get(tensor, tensor), state) in checkpoint.tensors
    untold = state == "buffer" and "foreign" in checkpoint.document and not stored
    return tensor, "param" if untold else state
