"""A peer store that stands still costs nobody's checkpoint, its end leaves no memory behind, and generations
use its memory one after the other."""

from __future__ import annotations

import dataclasses
import os
import queue
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from elastic_train.checkpoint.engine.arena import Arena
from elastic_train.checkpoint.snapshot import Buffer, Snapshot
from elastic_train.cluster.checkpoint_io import PartWriter
from elastic_train.cluster.peer_store import segments
from elastic_train.cluster.peer_store.peer_store import CONCURRENCY, PeerStore
from elastic_train.cluster.ray_calls import answer, remote
from elastic_train.cluster.worker.direct_tier import DirectTier
from elastic_train.cluster.worker.shared_memory_tier import SharedMemoryTier
from elastic_train.config import Batch, RunSpec
from elastic_train.control.events import Event, PartWritten
from elastic_train.geometry.box import Box
from elastic_train.geometry.fragments import Fragments

pytestmark = [pytest.mark.ring3, pytest.mark.timeout(400)]
WAIT_S = 120.0


class Controller:
    """What a peer store tells its words to."""

    def deliver_kept(self, node: str, words: list[Any]) -> bool:
        return True


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(
        "local", num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=100_000_000
    )
    yield
    ray.shutdown()


def sealed(step: int, arena: Arena, slot: int) -> tuple[Snapshot, threading.Event]:
    released = threading.Event()
    data = np.frombuffer(arena.slot(slot), np.float32)[:3]
    arena.open(slot)
    data[:] = step
    made = Snapshot(
        generation=1,
        rank=0,
        step=step,
        fragments=Fragments.of([("w", "param", "float32", (3,), Box.whole((3,)))]),
        document={"trainable": ["w"]},
        buffer=Buffer(
            offsets=(0,),
            nbytes=12,
            memory=arena.slot(slot)[:12],
            arena=arena,
            slot=slot,
            stamp=arena.seal(slot),
            release=released.set,
        ),
    )
    return made, released


def test_checkpoints_go_on_beside_a_peer_store_that_stands_still(cluster: None, tmp_path: Path) -> None:
    spec = RunSpec(
        name="run",
        storage_path=str(tmp_path),
        batch=Batch(global_size=4, micro_size=1),
        max_steps=9,
        min_workers=1,
        max_workers=1,
    )
    words: queue.Queue[Event] = queue.Queue()
    notes: queue.Queue[str] = queue.Queue()
    direct = DirectTier(PartWriter(spec, words.put, clock=lambda: 0.0), notes.put)
    peer_tier = SharedMemoryTier("w0001", direct, every=1, note=notes.put)
    controller = remote(Controller, num_cpus=0).remote()
    made = remote(PeerStore, concurrency_groups=CONCURRENCY, num_cpus=0)
    peer_store = made.remote(run="hung", node="n1", spec=spec, controller=controller)
    pid = answer(peer_store.ready.remote(), WAIT_S)
    peer_tier.meet(peer_store)
    arena = peer_tier.memory(1, 4096)
    mine = f"{segments.PREFIX}hung-n1-w0001-1-{pid}"
    assert (segments.DIRECTORY / mine).exists()
    os.kill(pid, signal.SIGSTOP)
    try:
        peer_tier.begun(4)
        taken, released = sealed(4, arena, 0)
        peer_tier.deliver(taken)
        written = words.get(timeout=WAIT_S)
        assert isinstance(written, PartWritten)
        assert written.step == 4
        assert released.wait(WAIT_S)
        assert "hangs" in notes.get(timeout=WAIT_S)
        assert not peer_tier.crowded(storage=True), "the next checkpoint may begin"
        arena = peer_tier.memory(2, 4096)  # of the next generation: here, as the peer store says nothing
        assert "no snapshots in peer memory" in notes.get(timeout=WAIT_S)
    finally:
        os.kill(pid, signal.SIGCONT)
    answer(peer_store.stop.remote(), WAIT_S)
    assert not (segments.DIRECTORY / mine).exists()


def complete(tier: SharedMemoryTier, arena: Arena, generation: int, step: int) -> None:
    """One snapshot on its whole way through the tier, in the arena's next free slot."""
    slot = arena.take()
    assert slot is not None, "a generation has room for its snapshots"
    taken, _ = sealed(step, arena, slot)
    buffer = dataclasses.replace(taken.buffer, release=lambda: arena.give_back(slot))
    tier.begun(step)
    tier.deliver(dataclasses.replace(taken, generation=generation, storage=False, buffer=buffer))
    tier.count_step()  # the next one is due, and waits
    assert tier.ready(WAIT_S)


def test_a_generation_snapshots_into_the_memory_of_the_one_before(cluster: None, tmp_path: Path) -> None:
    spec = RunSpec(
        name="run",
        storage_path=str(tmp_path),
        batch=Batch(global_size=4, micro_size=1),
        max_steps=9,
        min_workers=1,
        max_workers=1,
    )
    notes: list[str] = []
    direct = DirectTier(PartWriter(spec, lambda word: None, clock=lambda: 0.0), notes.append)
    tier = SharedMemoryTier("w0001", direct, every=1, note=notes.append)
    controller = remote(Controller, num_cpus=0).remote()
    made = remote(PeerStore, concurrency_groups=CONCURRENCY, num_cpus=0)
    peer_store = made.remote(run="again", node="n1", spec=spec, controller=controller)
    tier.meet(peer_store)

    def held() -> list[tuple[int, int]]:
        return [(s.generation, s.step) for s in answer(peer_store.reported.remote(), WAIT_S).snapshots]

    def files() -> list[str]:
        return sorted(path.name for path in segments.DIRECTORY.glob(f"{segments.PREFIX}again-*"))

    try:
        first = tier.memory(1, 3 * 4096)
        (file,) = files()
        for step in (1, 2):
            complete(tier, first, 1, step)
        assert held() == [(1, 1), (1, 2)]

        assert tier.memory(2, 2 * 4096) is first, "a smaller share fits"
        assert first.free == 2
        assert files() == [file]
        complete(tier, first, 2, 3)
        assert held()[-2:] == [(1, 2), (2, 3)], "what the generation before had may still be needed"
        complete(tier, first, 2, 4)
        assert held() == [(2, 3), (2, 4)]
        assert first.free == 2, "only the newest is kept here"

        assert tier.memory(3, 4096) is not first, "less than half of it would be of use"
        other = tier.memory(3, 4 * 4096)
        assert len(files()) == 2, "the old one, and one of the size that was asked for last"
        assert other.size == 4 * 4096
        for step in (5, 6):
            complete(tier, other, 3, step)
        assert held() == [(3, 5), (3, 6)]
        assert len(files()) == 1
        assert file not in files()
        assert [note for note in notes if "on this node only" not in note] == []
    finally:
        answer(peer_store.stop.remote(), WAIT_S)
    assert files() == []
