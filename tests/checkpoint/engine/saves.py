"""A training process that saves behind its steps; run as a program it is killed on the way."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import xxhash

from elastic_train.checkpoint.commit import assemble
from elastic_train.checkpoint.engine.arena import Arena, slot_bytes
from elastic_train.checkpoint.engine.engine import Engine
from elastic_train.checkpoint.run_directory import RunDirectory, attempt_path
from elastic_train.checkpoint.snapshot import Snapshot
from elastic_train.checkpoint.writer import write_part
from elastic_train.geometry.box import Box
from elastic_train.geometry.fragments import Fragments
from elastic_train.storage.posix_store import PosixStore
from elastic_train.storage.store import Store
from elastic_train.testing.faulty_store import Fault, FaultyStore, KillAtByte

SIZES = {"a": 300_000, "b": 40_000, "c": 7}


def state(name: str, step: int) -> np.ndarray:
    """What tensor `name` is after `step` steps."""
    return np.random.default_rng([ord(name), step]).standard_normal(SIZES[name]).astype(np.float32)


class Tensor:
    def __init__(self, name: str) -> None:
        self.key, self.settled, self.data, self.writes = name, True, state(name, 0), 0
        self.nbytes = self.data.nbytes

    def version(self) -> int:
        return self.writes

    def fingerprint(self) -> int:
        return xxhash.xxh3_64_intdigest(self.data.data)

    def fingerprint_of(self, copied: memoryview) -> int:
        return xxhash.xxh3_64_intdigest(copied)

    def copy(self, start: int, stop: int, target: memoryview) -> None:
        np.frombuffer(target, np.uint8)[:] = self.data.view(np.uint8)[start:stop]

    def update(self, step: int) -> None:
        self.data[:] = state(self.key, step)
        self.writes += 1


class Trainer:
    """One process that is worker and controller: saves, assembles, commits, prunes."""

    def __init__(self, store: Store, *, wait: bool = False, slots: int = 2) -> None:
        """`wait` for a free slot at a save; without it a save is made up for as soon as there is one."""
        self.run = RunDirectory(store)
        self.term = self.run.begin_term("test")
        self.tensors = [Tensor(name) for name in SIZES]
        self.notes: list[str] = []
        arena = Arena.private(slot_bytes(t.nbytes for t in self.tensors), slots=slots)
        self.engine = Engine(arena, self._deliver, note=self.notes.append)
        self._wait, self._owed = wait, False

    def step(self, step: int, *, save: bool) -> None:
        self.engine.fence()
        for tensor in self.tensors:
            tensor.update(step)
        if save or self._owed:
            self._owed = not self.engine.begin(self._snapshot(step), self.tensors, wait=self._wait)

    def _snapshot(self, step: int) -> Snapshot:
        rows = ((t.key, "param", "float32", t.data.shape, Box.whole(t.data.shape)) for t in self.tensors)
        return Snapshot(
            generation=1, rank=0, step=step, fragments=Fragments.of(rows), document={"step": step}
        )

    def _deliver(self, taken: Snapshot) -> None:
        directory = attempt_path(step=taken.step, generation=1)
        part = write_part(self.run.store, directory, 0, tuple(taken.pieces()))
        taken.buffer.release()
        assembled = assemble(self.run.store, directory, [part], taken.document)
        stored = self.run.commit(assembled, term=self.term, generation=1, step=taken.step, lineage=((1, 0),))
        self.run.prune([stored.slot], term=self.term, writing=1)


def main(arguments: Sequence[str]) -> None:
    directory, byte = arguments
    faults: list[Fault] = [KillAtByte(byte=int(byte))]
    trainer = Trainer(FaultyStore(PosixStore(Path(directory)), faults), wait=True)
    for step in range(1, 1000):
        trainer.step(step, save=True)


if __name__ == "__main__":
    main(sys.argv[1:])
