"""A commit ends in one event, whatever storage or our own code does; what comes true late is told, too."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from elastic_train.checkpoint.run_directory import RunDirectory
from elastic_train.checkpoint.snapshot import Buffer, Snapshot
from elastic_train.cluster.checkpoint_io import PartWriter
from elastic_train.cluster.controller.committer import Committer, versions
from elastic_train.cluster.controller.effects import Effects, Lane
from elastic_train.cluster.messages import Writing
from elastic_train.config import Batch, RunSpec, Timing
from elastic_train.control.commands import Commit, Prune
from elastic_train.control.events import CheckpointCommitted, Event, PartWritten, SaveFailed
from elastic_train.geometry.box import Box
from elastic_train.geometry.fragments import Fragments
from elastic_train.storage.store import Store
from tests.cluster.conftest import eventually

pytestmark = pytest.mark.ring1
WAIT_S = 100.0
DOCUMENT: dict[str, Any] = {
    "trainable": ["w"],
    "aliases": {},
    "optimizer": {"scalars": {}, "states": []},
    "step": 4,
}


def of_weight(values: np.ndarray, document: dict[str, Any], *, generation: int, step: int = 4) -> Snapshot:
    """A state of one tensor."""
    shape = values.shape
    return Snapshot(
        generation=generation,
        rank=0,
        step=step,
        fragments=Fragments.of([("w", "param", "float32", shape, Box.whole(shape))]),
        document=document,
        buffer=Buffer.of([values]),
    )


class Held:
    """A store that gives no answer to a read while a gate is shut."""

    def __init__(self, store: Store) -> None:
        self._store, self.gate = store, threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        self.gate.wait(WAIT_S)
        return self._store.read(path, start, length)


class Run:
    """A run's storage, a worker's share in it, and the controller's hand on it."""

    def __init__(self, storage: Path, **timing: float) -> None:
        self.spec = RunSpec(
            name="run",
            storage_path=str(storage),
            batch=Batch(global_size=4, micro_size=1),
            max_steps=9,
            min_workers=1,
            max_workers=1,
            timing=Timing(**timing),
        )
        self.said: queue.Queue[Event] = queue.Queue()
        self.effects = Effects(fault=lambda name, error: None)
        self.committer = Committer(self.spec, "me", self.said.put, self.effects)
        self.committer.take_over()
        self.committer.lineage = ((1, 0),)

    def held(self) -> threading.Event:
        """Let storage answer no more; it does when what is returned is set."""
        store = Held(self.committer.store)
        self.committer.store = cast("Store", store)
        return store.gate

    def part(self, document: dict[str, Any], step: int = 4) -> PartWritten:
        snapshot = of_weight(np.arange(3, dtype=np.float32), document, generation=1, step=step)
        PartWriter(self.spec, self.said.put, clock=lambda: 0.0).save(snapshot)
        part = self.next()
        assert isinstance(part, PartWritten)
        return part

    def next(self) -> Event:
        return self.said.get(timeout=WAIT_S)


@pytest.fixture
def effects() -> Iterator[list[Effects]]:
    made: list[Effects] = []
    yield made
    for one in made:
        one.close(*Lane)


def test_whatever_a_commit_raises_is_a_failed_save(tmp_path: Path, effects: list[Effects]) -> None:
    run = Run(tmp_path)
    effects.append(run.effects)
    without_aliases = {key: value for key, value in DOCUMENT.items() if key != "aliases"}
    part = run.part(without_aliases)
    run.committer.commit(Commit(generation=1, step=4, parts=(part,)))
    failed = run.next()
    assert isinstance(failed, SaveFailed)
    assert (failed.generation, failed.step) == (1, 4)
    assert "KeyError: 'aliases'" in failed.problem
    run.part(DOCUMENT)
    run.committer.commit(Commit(generation=1, step=4, parts=(part,)))
    assert isinstance(run.next(), CheckpointCommitted), "the lane goes on"


def test_a_commit_that_storage_holds_up_is_late_and_is_told_when_it_comes_true(
    tmp_path: Path, effects: list[Effects]
) -> None:
    run = Run(tmp_path, storage_trouble_s=0.2)
    effects.append(run.effects)
    part = run.part(DOCUMENT)
    gate = run.held()
    run.committer.commit(Commit(generation=1, step=4, parts=(part,)))
    late = run.next()
    assert isinstance(late, SaveFailed)
    assert "took longer than" in late.problem
    gate.set()
    committed = run.next()
    assert isinstance(committed, CheckpointCommitted)
    assert committed.stored.step == 4


def test_a_prune_waits_behind_commits_that_it_does_not_know_and_leaves_them(
    tmp_path: Path, effects: list[Effects]
) -> None:
    run = Run(tmp_path)
    effects.append(run.effects)
    parts = {step: run.part(DOCUMENT | {"step": step}, step) for step in (1, 2, 3, 4)}

    def commit(step: int) -> None:
        run.committer.commit(Commit(generation=1, step=step, parts=(parts[step],)))

    slots: dict[int, int] = {}
    for step in (1, 2):
        commit(step)
        committed = run.next()
        assert isinstance(committed, CheckpointCommitted)
        slots[step] = committed.stored.slot
    gate = run.held()
    commit(3)
    commit(4)
    run.committer.prune(Prune(keep=(slots[2],)))  # decided when step 2 was told
    gate.set()
    assert all(isinstance(run.next(), CheckpointCommitted) for _ in range(2))
    eventually("the prune ends", lambda: not run.effects.outstanding())
    assert [stored.step for stored in RunDirectory(run.committer.store).commits()] == [2, 3, 4]


class Metered:
    """A store of which each write takes seven seconds. `watched` is called in the middle of it."""

    def __init__(self, store: Store, watched: Callable[[], None]) -> None:
        self._store, self._watched, self.now = store, watched, 100.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    @contextmanager
    def stream(self, path: str) -> Iterator[Metered]:
        yield self

    def write(self, *_: Any) -> None:
        self.now += 7.0
        self._watched()


def test_a_writer_tells_when_storage_last_took_bytes(tmp_path: Path, effects: list[Effects]) -> None:
    """Page after page, also where storage is slow; and nothing once all is written."""
    run, seen = Run(tmp_path), list[Writing | None]()
    effects.append(run.effects)
    store = Metered(run.committer.store, lambda: seen.append(writer.writing()))
    writer = PartWriter(run.spec, run.said.put, clock=lambda: store.now)
    writer.store = cast("Store", store)
    values = np.ones(1 << 20, np.float32)
    writer.save(of_weight(values, DOCUMENT, generation=6))
    assert len(seen) > 4
    assert {said.generation for said in seen if said is not None} == {6}
    assert all(said is not None and said.seconds <= 21.0 for said in seen), "not since it began"
    assert writer.writing() is None


def test_a_commit_that_is_ordered_again_meanwhile_is_answered_once(
    tmp_path: Path, effects: list[Effects]
) -> None:
    run = Run(tmp_path)
    effects.append(run.effects)
    part = run.part(DOCUMENT)
    gate = run.held()
    for _ in range(3):
        run.committer.commit(Commit(generation=1, step=4, parts=(part,)))
    assert len(run.effects.outstanding()) == 1
    gate.set()
    assert isinstance(run.next(), CheckpointCommitted)
    assert run.said.empty()


def test_a_package_that_came_as_a_directory_has_no_version_and_costs_no_checkpoint() -> None:
    assert versions(("numpy", "not_installed_as_a_distribution")) == {"numpy": np.__version__}
