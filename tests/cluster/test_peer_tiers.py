"""A worker without a peer store writes its own checkpoints, and says of each what became of it."""

from __future__ import annotations

import queue
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elastic_train.checkpoint.snapshot import Buffer, Snapshot
from elastic_train.cluster.checkpoint_io import PartWriter
from elastic_train.cluster.worker.direct_tier import DirectTier
from elastic_train.config import Batch, RunSpec
from elastic_train.control.events import Event, PartWritten, SaveFailed
from elastic_train.geometry.box import Box
from elastic_train.geometry.fragments import Fragments

pytestmark = pytest.mark.ring1
WAIT_S = 100.0


class Worker:
    """What a worker process is to its tier: words that it posts, notes for people."""

    def __init__(self, storage: Path) -> None:
        spec = RunSpec(
            name="run",
            storage_path=str(storage),
            batch=Batch(global_size=4, micro_size=1),
            max_steps=9,
            min_workers=1,
            max_workers=1,
        )
        self.words: queue.Queue[Event] = queue.Queue()
        self.notes: list[str] = []
        writer = PartWriter(spec, self.words.put, clock=lambda: 0.0)
        self.tier = DirectTier(writer, self.notes.append)
        self.tier.memory(1, 4096)

    def snapshot(self, step: int, document: dict[str, Any]) -> tuple[Snapshot, threading.Event]:
        released = threading.Event()
        buffer = replace(Buffer.of([np.full(3, step, np.float32)]), release=released.set)
        fragments = Fragments.of([("w", "param", "float32", (3,), Box.whole((3,)))])
        snapshot = Snapshot(
            generation=1, rank=0, step=step, fragments=fragments, document=document, buffer=buffer
        )
        self.tier.begun(step)
        return snapshot, released


def test_a_checkpoint_is_written_behind_the_step_and_the_next_may_begin_when_it_is_durable(
    tmp_path: Path,
) -> None:
    worker = Worker(tmp_path)
    snapshot, released = worker.snapshot(4, {"trainable": ["w"]})
    worker.tier.deliver(snapshot)
    said = worker.words.get(timeout=WAIT_S)
    assert isinstance(said, PartWritten)
    assert (said.step, said.rank, said.generation) == (4, 0, 1)
    assert released.wait(WAIT_S)
    settled(worker)
    assert (tmp_path / "run" / "checkpoints" / "step-0000000004.g1" / "w00000.safetensors").exists()


def test_no_snapshot_for_peer_memory_is_taken_where_there_is_no_peer_store(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    assert worker.tier.crowded(storage=False)
    assert not worker.tier.crowded(storage=True)


def test_whatever_goes_wrong_is_said_and_the_next_checkpoint_is_written(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    broken, released = worker.snapshot(4, {})  # a document that says nothing of its tensors: a fault of ours
    worker.tier.deliver(broken)
    said = worker.words.get(timeout=WAIT_S)
    assert isinstance(said, SaveFailed)
    assert "KeyError" in said.problem
    assert released.wait(WAIT_S)
    settled(worker)
    sound, _ = worker.snapshot(5, {"trainable": ["w"]})
    worker.tier.deliver(sound)
    assert isinstance(worker.words.get(timeout=WAIT_S), PartWritten)


def test_a_store_that_cannot_be_written_to_costs_the_checkpoint_alone(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "run" / "checkpoints").write_text("a file where a directory should be")
    snapshot, released = worker.snapshot(4, {"trainable": ["w"]})
    worker.tier.deliver(snapshot)
    assert isinstance(worker.words.get(timeout=WAIT_S), SaveFailed)
    assert released.wait(WAIT_S)
    settled(worker)


def settled(worker: Worker) -> None:
    """Wait until nothing is being written."""
    while worker.tier.crowded(storage=True):
        threading.Event().wait(0.01)
