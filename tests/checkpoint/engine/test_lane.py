"""Snapshots off a device: copies and updates are enqueued, and events alone keep them apart."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from elastic_train.checkpoint.engine.arena import Arena, slot_bytes
from elastic_train.checkpoint.engine.copying import BLOCK, blocks, places
from elastic_train.checkpoint.engine.engine import Engine
from elastic_train.checkpoint.engine.lane import Span
from tests.checkpoint.engine.test_engine import WAIT_S, Memory, Receiver, as_bytes, snapshot_of

pytestmark = pytest.mark.ring1


class Stream:
    """What is enqueued is done in order by a thread of its own, whenever that gets to it."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def enqueue(self, work: Callable[[], object]) -> None:
        self._work.put(work)

    def mark(self) -> threading.Event:
        """Set once all that was enqueued so far is done."""
        done = threading.Event()
        self.enqueue(done.set)
        return done

    def wait_for(self, other: Stream) -> None:
        mark = other.mark()
        self.enqueue(lambda: mark.wait(WAIT_S))

    def close(self) -> None:
        self._work.put(None)
        self._thread.join(WAIT_S)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()


class Device:
    """A lane between two streams: `main` computes and updates, `side` copies."""

    instant = False

    def __init__(self) -> None:
        self.main, self.side = Stream(), Stream()
        self.begun = self.closed = 0

    def follow(self) -> None:
        self.side.wait_for(self.main)

    def copy(self, spans: Sequence[Span], memory: memoryview) -> None:
        self.begun += 1
        for source, start, stop, offset in spans:
            target = memory[offset : offset + stop - start]
            self.side.enqueue(lambda s=source, a=start, b=stop, t=target: s.copy(a, b, t))

    def order(self) -> None:
        self.main.wait_for(self.side)

    def wait(self) -> None:
        assert self.side.mark().wait(WAIT_S)

    def fingerprint(self, source: Memory) -> Callable[[], int]:
        found: list[int] = []
        self.side.enqueue(lambda: found.append(source.fingerprint()))
        mark = self.side.mark()

        def read() -> int:
            assert mark.wait(WAIT_S)
            return found[0]

        return read

    def close(self) -> None:
        self.wait()
        self.closed += 1

    def update(self, source: Memory, value: int) -> None:
        """The host has counted the write long before the device makes it."""
        source.writes += 1
        self.main.enqueue(lambda: source.add(value, seen=False))


@contextmanager
def engine_on(device: Device, sources: list[Memory], receiver: Receiver) -> Iterator[Engine]:
    arena = Arena.private(slot_bytes(s.nbytes for s in sources), slots=2)
    engine: Engine = Engine(arena, receiver, lane=device)
    yield engine
    engine.close()
    assert not engine.counts.failed
    device.main.close()
    device.side.close()


def three() -> list[Memory]:
    return [Memory("a", BLOCK + 5), Memory("b", 70), Memory("c", 7000)]


def test_the_host_passes_the_fence_at_once_and_the_device_keeps_update_and_copy_apart() -> None:
    device, sources, receiver, held = Device(), three(), Receiver(), threading.Event()
    with engine_on(device, sources, receiver) as engine:
        for number in (1, 2, 3):  # beyond those whose contents are compared on the way
            expected = as_bytes(sources)
            if number == 3:
                device.side.enqueue(lambda: held.wait(WAIT_S))
            assert engine.begin(snapshot_of(number, sources), sources)
            engine.fence()
            for source in sources:
                device.update(source, number)
            assert number != 3 or number not in receiver.bytes, "the copy has not even begun"
            if number == 3:
                held.set()
            assert receiver.wait_for(number) == expected
            assert device.main.mark().wait(WAIT_S)
    assert engine.counts.torn == 0
    assert device.closed == 1


def test_a_copy_waits_on_the_device_for_the_update_that_made_the_state() -> None:
    device, sources, receiver = Device(), three(), Receiver()
    with engine_on(device, sources, receiver) as engine:
        slow = threading.Event()
        device.main.enqueue(lambda: slow.wait(WAIT_S))
        before = as_bytes(sources)
        for source in sources:
            device.update(source, 1)
        assert engine.begin(snapshot_of(1, sources), sources)
        assert as_bytes(sources) == before, "the update has not run"
        slow.set()
        found = receiver.wait_for(1)
        engine.fence()
        assert found == as_bytes(sources)
        assert found != before


def test_a_write_between_commit_and_fence_is_found_by_its_version_though_nothing_was_copied_yet() -> None:
    device, sources, receiver = Device(), three(), Receiver()
    with engine_on(device, sources, receiver) as engine:
        held = threading.Event()
        device.side.enqueue(lambda: held.wait(WAIT_S))
        dropped = threading.Thread(target=held.set)
        assert engine.begin(snapshot_of(1, sources), sources)
        sources[1].writes += 1
        device.main.enqueue(lambda: sources[1].add(1, seen=False))
        assert device.main.mark().wait(WAIT_S)
        dropped.start()
        engine.fence()
    assert not receiver.bytes
    assert engine.counts.torn == 1


def test_what_the_forward_writes_is_ordered_behind_its_copy_without_a_wait() -> None:
    device, receiver = Device(), Receiver()
    sources = [Memory("a", 2 * BLOCK), Memory("running_mean", 128, settled=False)]
    with engine_on(device, sources, receiver) as engine:
        held = threading.Event()
        device.side.enqueue(lambda: held.wait(WAIT_S))
        expected = as_bytes(sources)
        beginning = threading.Thread(target=lambda: engine.begin(snapshot_of(1, sources), sources))
        beginning.start()
        beginning.join(WAIT_S)
        assert not beginning.is_alive(), "the host does not wait for the copy"
        device.update(sources[1], 7)
        held.set()
        assert receiver.wait_for(1) == expected
    assert engine.counts.torn == 0


def test_a_failed_device_fails_the_snapshot_and_not_the_training_thread() -> None:
    class Gone(Device):
        def copy(self, spans: Sequence[Span], memory: memoryview) -> None:
            raise RuntimeError("the device is gone")

    device, receiver, notes = Gone(), Receiver(), list[str]()
    sources = three()
    arena = Arena.private(slot_bytes(s.nbytes for s in sources), slots=1)
    engine: Engine = Engine(arena, receiver, lane=device, note=notes.append)
    assert engine.begin(snapshot_of(1, sources), sources)
    engine.fence()
    engine.close()
    assert notes == ["the snapshot of step 1 failed: RuntimeError: the device is gone"]
    assert engine.free == 1


def test_small_neighbours_travel_together_and_large_ones_in_blocks() -> None:
    sources = [Memory(f"s{i}", 700) for i in range(300)]
    sources.insert(150, Memory("large", 2 * BLOCK + 1))
    cut = list(blocks(places(sources), range(len(sources))))
    assert [len(block) for block in cut] == [150, 1, 1, 1, 150]
    assert sum(stop - start for block in cut for _, start, stop in block) == sum(s.nbytes for s in sources)
    without = list(blocks(places(sources), [i for i in range(len(sources)) if i not in (3, 150)]))
    assert [len(block) for block in without] == [3, 146, 150], "never over what lies between"
