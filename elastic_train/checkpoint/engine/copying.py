"""Copy one snapshot into a slot, block by block, on the copying thread and the training thread.

A thread in the background takes them while the step computes. Training takes what is left when it is about
to write: it never waits for a block that nobody works on.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from elastic_train.checkpoint.engine.arena import offsets
from elastic_train.checkpoint.engine.lane import AtOnce, CopyLane, Span
from elastic_train.checkpoint.engine.source import Source

BLOCK = 8 << 20
"""Bytes copied at a time: about a millisecond, which is what the update waits for at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotRange:
    """Where a fragment's bytes are in the slot."""

    key: str
    offset: int
    nbytes: int


def places(sources: Sequence[Source]) -> tuple[SlotRange, ...]:
    """The fragments one after the other."""
    starts, _ = offsets(source.nbytes for source in sources)
    return tuple(
        SlotRange(key=source.key, offset=start, nbytes=source.nbytes)
        for source, start in zip(sources, starts, strict=True)
    )


class Copying:
    """`sources` come in the order in which the update will write them. Any number of threads may `help`.

    `audited` are the places of those whose contents are compared with what they were when the snapshot began;
    `eager` the keys of those that are copied before the rest, beside those that aren't settled.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        memory: memoryview,
        audited: Sequence[int],
        *,
        eager: Collection[str] = (),
        lane: CopyLane | None = None,
    ) -> None:
        self.sources, self.places = tuple(sources), places(sources)
        self.nbytes = max((place.offset + place.nbytes for place in self.places), default=0)
        self.memory = memory
        self.error: Exception | None = None
        self._lane: CopyLane = lane or AtOnce()
        self._versions = [source.version() for source in sources]
        self._prints = {index: self._lane.fingerprint(sources[index]) for index in audited}
        early = [s.key in eager or not s.settled for s in sources]
        first = list(blocks(self.places, [i for i, due in enumerate(early) if due]))
        self._early = len(first)
        self._blocks = [*first, *blocks(self.places, [i for i, due in enumerate(early) if not due])]
        self._last = {index: n for n, block in enumerate(self._blocks) for index, _, _ in block}
        self._begun = [False] * len(self._blocks)
        self._safe = [False] * len(self._blocks)  # from writes: versions were compared in time
        self._taken = self._early
        self._changed: set[int] = set()
        self._news = threading.Condition()

    def copy_unsettled(self) -> None:
        """Copy now what may change before the update; the other blocks keep their order."""
        for number in range(self._early):
            self._copy(number)
        if self._early:
            self._secure(self._early)

    def help(self) -> bool:
        """Copy the next block that nobody has taken; False where there is none."""
        with self._news:
            if self._taken == len(self._blocks):
                return False
            number = self._taken
            self._taken += 1
        self._copy(number)
        return True

    def finish(self, key: str | None = None) -> None:
        """Return when writes can harm no block, or none up to the fragment `key`; helps rather than waits."""
        last = len(self._blocks) - 1
        if key is not None:
            index = next(i for i, place in enumerate(self.places) if place.key == key)
            last = self._last.get(index, -1)
        while self._taken <= last and self.help():
            pass
        with self._news:
            self._news.wait_for(lambda: all(self._begun[: last + 1]))
        self._secure(last + 1)

    def land(self) -> None:
        """Return when every block is in the slot."""
        while self.help():
            pass
        with self._news:
            self._news.wait_for(lambda: all(self._begun))
        try:
            self._lane.wait()
        except Exception as error:  # noqa: BLE001 - the snapshot fails, the thread must not
            self.error = error
        with self._news:
            for number in range(len(self._blocks)):
                self._compare(number)

    def changed(self) -> tuple[str, ...]:
        """After `land`: fragments whose copy is not what they were when the snapshot began."""
        for index, before in self._prints.items():
            place = self.places[index]
            copied = self.memory[place.offset : place.offset + place.nbytes]
            if self.sources[index].fingerprint_of(copied) != before():
                self._changed.add(index)
        return tuple(self.places[index].key for index in sorted(self._changed))

    def restless(self) -> tuple[str, ...]:
        """Before the update: audited fragments that changed since the snapshot began, in time for the copy or
        not. Those that aren't settled may.
        """
        return tuple(
            self.places[index].key
            for index, before in self._prints.items()
            if self.sources[index].settled and self.sources[index].fingerprint() != before()
        )

    def _copy(self, number: int) -> None:
        spans = [
            Span(self.sources[index], start, stop, self.places[index].offset + start)
            for index, start, stop in self._blocks[number]
        ]
        try:
            self._lane.copy(spans, self.memory)
        except Exception as error:  # noqa: BLE001 - the snapshot fails, the training thread must not
            self.error = error
        with self._news:
            if self._lane.instant:
                self._compare(number)
            self._begun[number] = True
            self._news.notify_all()

    def _secure(self, stop: int) -> None:
        """On the training thread: whatever it writes from now on comes after the copies of these blocks."""
        with self._news:
            for number in range(stop):
                self._compare(number)
        try:
            self._lane.order()
        except Exception as error:  # noqa: BLE001 - the snapshot fails, the training thread must not
            self.error = error

    def _compare(self, number: int) -> None:
        """Once a block: was its source left alone until no write could reach the copy?"""
        if self._safe[number]:
            return
        self._safe[number] = True
        for index, _, _ in self._blocks[number]:
            if self.sources[index].version() != self._versions[index]:
                self._changed.add(index)


def blocks(found: Sequence[SlotRange], indices: Iterable[int]) -> Iterator[list[tuple[int, int, int]]]:
    """(fragment, start, stop) in blocks: large fragments cut, small neighbours together.

    Fragments of a block lie side by side in the slot, so that a device can send them as one.
    """
    block: list[tuple[int, int, int]] = []
    for index in indices:
        place = found[index]
        joins = block and block[-1][0] == index - 1 and place.nbytes <= BLOCK
        if joins and place.offset + place.nbytes - found[block[0][0]].offset <= BLOCK:
            block.append((index, 0, place.nbytes))
            continue
        if block:
            yield block
        block = []
        if place.nbytes <= BLOCK:
            block = [(index, 0, place.nbytes)] if place.nbytes else []
            continue
        for start in range(0, place.nbytes, BLOCK):
            yield [(index, start, min(start + BLOCK, place.nbytes))]
    if block:
        yield block
