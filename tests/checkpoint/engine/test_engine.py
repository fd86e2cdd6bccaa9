"""Snapshots of memory that a step reads and an update writes, under every order of the threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import xxhash

from elastic_train.checkpoint.engine import audit
from elastic_train.checkpoint.engine.arena import Arena, slot_bytes
from elastic_train.checkpoint.engine.copying import BLOCK
from elastic_train.checkpoint.engine.engine import Engine
from elastic_train.checkpoint.snapshot import Snapshot
from elastic_train.errors import MemoryTooSmall
from elastic_train.geometry.box import Box
from elastic_train.geometry.fragments import Fragments

pytestmark = pytest.mark.ring1
WAIT_S = 100.0


class Memory:
    """A fragment whose owner counts its writes. `gate` holds a copy until it is set."""

    def __init__(self, key: str, size: int, *, settled: bool = True) -> None:
        self.key, self.settled = key, settled
        self.data = np.random.default_rng(abs(hash(key)) % 2**32).integers(0, 255, size, dtype=np.uint8)
        self.writes = 0
        self.reached, self.gate = threading.Event(), threading.Event()
        self.gate.set()

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def version(self) -> int:
        return self.writes

    def fingerprint(self) -> int:
        return xxhash.xxh3_64_intdigest(self.data)

    def fingerprint_of(self, copied: memoryview) -> int:
        return xxhash.xxh3_64_intdigest(copied)

    def copy(self, start: int, stop: int, target: memoryview) -> None:
        self.reached.set()
        assert self.gate.wait(WAIT_S)
        np.frombuffer(target, np.uint8)[:] = self.data[start:stop]

    def add(self, value: int, *, seen: bool = True) -> None:
        """A write; one that is not `seen` changes no version, as through `.data` or a custom operation."""
        self.data += np.uint8(value)
        self.writes += seen


def snapshot_of(step: int, sources: Sequence[Memory]) -> Snapshot:
    """Of these fragments at a step, before they are copied."""
    rows = ((s.key, "param", "uint8", (s.nbytes,), Box.whole((s.nbytes,))) for s in sources)
    return Snapshot(generation=1, rank=0, step=step, fragments=Fragments.of(rows), document={})


class Receiver:
    """Receives snapshots and keeps their bytes; each is given back when the test says so, or at once."""

    def __init__(self, *, keep: bool = False) -> None:
        self.keep, self.taken = keep, list[Snapshot]()
        self.bytes: dict[int, dict[str, bytes]] = {}
        self.news = threading.Condition()

    def __call__(self, taken: Snapshot) -> None:
        found = {piece.tensor: bytes(piece.bytes()) for piece in taken.pieces()}
        with self.news:
            self.bytes[taken.step] = found
            self.taken.append(taken)
            self.news.notify_all()
        if not self.keep:
            taken.buffer.release()

    def wait_for(self, step: int) -> dict[str, bytes]:
        with self.news:
            assert self.news.wait_for(lambda: step in self.bytes, WAIT_S)
            return self.bytes[step]


@contextmanager
def engine_of(
    sources: list[Memory],
    deliver: Callable[[Snapshot], None],
    *,
    slots: int = 2,
    note: Callable[[str], None] = lambda _: None,
) -> Iterator[Engine]:
    arena = Arena.private(slot_bytes(s.nbytes for s in sources), slots=slots)
    engine: Engine = Engine(arena, deliver, note=note)
    yield engine
    engine.close()
    assert not engine.counts.failed


def three() -> list[Memory]:
    return [Memory("a", BLOCK + 5), Memory("b", 70), Memory("c", BLOCK)]


def as_bytes(sources: list[Memory]) -> dict[str, bytes]:
    return {s.key: s.data.tobytes() for s in sources}


def test_each_snapshot_is_the_state_right_after_its_step() -> None:
    sources, receiver = three(), Receiver()
    expected: dict[int, dict[str, bytes]] = {}
    with engine_of(sources, receiver, slots=3) as engine:
        for step in range(1, 6):
            engine.fence()
            for source in sources:
                source.add(step)
            expected[step] = as_bytes(sources)
            assert engine.begin(snapshot_of(step, sources), sources)
    assert receiver.bytes == expected
    assert engine.counts.delivered == 5
    assert engine.counts.torn == 0


def test_the_update_waits_for_what_is_being_copied_and_copies_the_rest_itself() -> None:
    sources, receiver = three(), Receiver()
    sources[0].gate.clear()
    with engine_of(sources, receiver) as engine:
        assert engine.begin(snapshot_of(1, sources), sources)
        expected = as_bytes(sources)
        assert sources[0].reached.wait(WAIT_S)
        passed = threading.Event()
        training = threading.Thread(target=lambda: (engine.fence(), passed.set()))
        training.start()
        assert not passed.wait(0.05)
        sources[0].gate.set()
        training.join(WAIT_S)
        assert passed.is_set()
        for source in sources:
            source.add(1)
        assert receiver.wait_for(1) == expected


def test_the_update_of_the_first_fragment_does_not_wait_for_the_last() -> None:
    sources, receiver = three(), Receiver()
    with engine_of(sources, receiver) as engine:
        sources[2].gate.clear()
        assert engine.begin(snapshot_of(1, sources), sources)
        expected = as_bytes(sources)
        engine.fence("a")
        sources[0].add(1)
        sources[2].gate.set()
        assert receiver.wait_for(1) == expected


def test_a_write_that_did_not_wait_is_never_handed_on() -> None:
    sources, receiver, notes = three(), Receiver(), list[str]()
    with engine_of(sources, receiver, note=notes.append) as engine:
        sources[0].gate.clear()
        assert engine.begin(snapshot_of(1, sources), sources)
        sources[2].add(1)
        sources[0].gate.set()
        engine.fence()
    assert not receiver.bytes
    assert engine.counts.torn == 1
    assert "c changed outside the update" in notes[0]


def test_a_write_that_no_version_shows_is_found_by_content_and_then_copied_first() -> None:
    sources, receiver, notes = three(), Receiver(), list[str]()
    with engine_of(sources, receiver, note=notes.append) as engine:
        sources[0].gate.clear()
        assert engine.begin(snapshot_of(1, sources), sources)
        assert sources[0].reached.wait(WAIT_S)
        sources[2].add(1, seen=False)
        sources[0].gate.set()
        engine.fence()
        while not notes:
            engine.fence()
        assert engine.begin(snapshot_of(2, sources), sources)
        expected = as_bytes(sources)
        sources[2].add(1, seen=False)
        assert receiver.wait_for(2) == expected
    assert engine.counts.torn == 1


def test_a_habit_of_writing_behind_the_version_is_learnt_even_if_the_copy_was_in_time() -> None:
    sources, receiver, notes = three(), Receiver(), list[str]()
    with engine_of(sources, receiver, note=notes.append) as engine:
        assert engine.begin(snapshot_of(1, sources), sources)
        receiver.wait_for(1)
        sources[2].add(1, seen=False)
        engine.fence()
        assert "c changed outside the update" in notes[0]
        sources[2].gate.clear()
        beginning = threading.Thread(target=lambda: engine.begin(snapshot_of(2, sources), sources))
        beginning.start()  # what it writes to is copied before training goes on
        assert sources[2].reached.wait(WAIT_S)
        beginning.join(0.05)
        assert beginning.is_alive()
        sources[2].gate.set()
        beginning.join(WAIT_S)
    assert engine.counts.torn == 0


def test_every_fragment_is_audited_in_its_turn() -> None:
    fragments = 300
    for number in range(audit.ALL):
        assert audit.audited(number, fragments) == tuple(range(fragments))
    turns = [audit.audited(number, fragments) for number in range(audit.ALL, audit.ALL + audit.TURNS)]
    assert sorted(index for turn in turns for index in turn) == list(range(fragments))


def test_what_changes_between_updates_is_copied_before_training_goes_on() -> None:
    statistics, receiver = Memory("running_mean", 128, settled=False), Receiver()
    sources = [Memory("a", 2 * BLOCK), statistics]
    with engine_of(sources, receiver) as engine:
        assert engine.begin(snapshot_of(1, sources), sources)
        expected = as_bytes([statistics])["running_mean"]
        statistics.add(7)
        assert receiver.wait_for(1)["running_mean"] == expected
    assert engine.counts.torn == 0


def test_without_a_free_slot_training_goes_on_and_what_was_left_out_is_counted() -> None:
    sources, receiver = [Memory("a", 100)], Receiver(keep=True)
    with engine_of(sources, receiver, slots=1) as engine:
        assert engine.begin(snapshot_of(1, sources), sources)
        receiver.wait_for(1)
        assert not engine.begin(snapshot_of(2, sources), sources)
        receiver.taken[0].buffer.release()
        assert engine.begin(snapshot_of(3, sources), sources)
        receiver.wait_for(3)
        receiver.taken[1].buffer.release()
    assert engine.counts.skipped == 1


def test_waiting_for_a_slot_ends_when_one_is_given_back() -> None:
    sources, receiver = [Memory("a", 100)], Receiver(keep=True)
    with engine_of(sources, receiver, slots=1) as engine:
        assert engine.begin(snapshot_of(1, sources), sources)
        receiver.wait_for(1)

        def release() -> None:
            while not engine.counts.waited:
                threading.Event().wait(0.001)
            receiver.taken[0].buffer.release()

        threading.Thread(target=release, daemon=True).start()
        assert engine.begin(snapshot_of(2, sources), sources, wait=True)
        receiver.wait_for(2)
        receiver.taken[1].buffer.release()
        receiver.taken[0].buffer.release()  # given up twice: the slot of the second snapshot is not touched
    assert engine.counts.waited == 1


def test_a_slot_in_use_keeps_its_bytes_while_other_snapshots_pass() -> None:
    sources = [Memory("a", 1000)]
    first: list[tuple[Snapshot, bytes]] = []

    def deliver(taken: Snapshot) -> None:
        if taken.step == 1:
            first.append((taken, bytes(taken.bytes_of(0))))
        else:
            taken.buffer.release()

    with engine_of(sources, deliver, slots=2) as engine:
        for step in range(1, 10):
            engine.fence()
            sources[0].add(step)
            assert engine.begin(snapshot_of(step, sources), sources, wait=True)
        taken, then = first[0]
        assert bytes(taken.bytes_of(0)) == then
        taken.buffer.release()


def test_failed_deliveries_stop_nothing_and_each_is_noted() -> None:
    sources, problems, dropped = [Memory("a", 100)], list[str](), list[int]()

    def deliver(taken: Snapshot) -> None:
        raise OSError("the disk is full")

    arena = Arena.private(4096, slots=2)
    engine: Engine = Engine(arena, deliver, note=problems.append, dropped=dropped.append)
    for step in range(1, 5):
        assert engine.begin(snapshot_of(step, sources), sources, wait=True)
        while len(problems) < step:
            engine.fence()
    engine.close()
    assert problems == [f"the snapshot of step {n} failed: OSError: the disk is full" for n in range(1, 5)]
    assert (dropped, engine.free) == ([1, 2, 3, 4], 2)


def test_a_copy_that_fails_fails_the_snapshot_and_not_the_training_thread() -> None:
    class Broken(Memory):
        def copy(self, start: int, stop: int, target: memoryview) -> None:
            raise RuntimeError("the device is gone")

    receiver, notes, sources = Receiver(), list[str](), [Broken("a", 100)]
    engine: Engine = Engine(Arena.private(4096, slots=1), receiver, note=notes.append)
    assert engine.begin(snapshot_of(1, sources), sources)
    engine.fence()
    engine.close()
    assert notes == ["the snapshot of step 1 failed: RuntimeError: the device is gone"]
    assert not receiver.bytes
    assert engine.free == 1


def test_memory_that_is_not_there_is_missed_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(MemoryTooSmall, match=r"3 snapshots of the state need 3,000,\d+,\d+\.\d MB in memory"):
        Arena.private(10**15, slots=3)
    with pytest.raises(MemoryTooSmall, match="has"):
        Arena.create(tmp_path / "segment", 10**15, slots=2)
    assert not list(tmp_path.iterdir())


def test_a_state_that_outgrew_its_slot_is_refused_and_the_slot_stays_free() -> None:
    sources = [Memory("a", 5000)]
    engine: Engine = Engine(Arena.private(4096, slots=1), Receiver())
    with pytest.raises(MemoryTooSmall):
        engine.begin(snapshot_of(1, sources), sources)
    assert engine.free == 1
    engine.close()


def test_two_mappings_of_a_segment_see_the_same_snapshot(tmp_path: Path) -> None:
    sources = [Memory("a", 5000)]
    here = Arena.create(tmp_path / "segment", slot_bytes([5000]), slots=2)
    there = Arena.attach(tmp_path / "segment", here.size, slots=2)
    receiver = Receiver(keep=True)
    engine: Engine = Engine(here, receiver)
    assert engine.begin(snapshot_of(1, sources), sources)
    receiver.wait_for(1)
    taken = receiver.taken[0]
    assert bytes(taken.detached().attached(there).bytes_of(0)) == sources[0].data.tobytes()
    engine.close()
