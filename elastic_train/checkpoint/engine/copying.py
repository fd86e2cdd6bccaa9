"""One snapshot on its way into a slot: blocks in write order, taken by whoever has time.

A thread in the background takes them while the step computes. Training takes what is left when it is about
to write: it never waits for a block that nobody works on.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from elastic_train.checkpoint.engine.arena import offsets
from elastic_train.checkpoint.engine.source import Source

BLOCK = 8 << 20
"""Bytes copied at a time: about a millisecond, which is what the update waits for at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a fragment's bytes are in the slot."""

    key: str
    offset: int
    nbytes: int


def places(sources: Sequence[Source]) -> tuple[Place, ...]:
    """The fragments one after the other."""
    starts, _ = offsets(source.nbytes for source in sources)
    return tuple(
        Place(key=source.key, offset=start, nbytes=source.nbytes)
        for source, start in zip(sources, starts, strict=True)
    )


class Copying:
    """`sources` come in the order in which the update will write them. Any number of threads may `help`.

    `audited` are the places of those whose contents are compared with what they were when the snapshot began.
    """

    def __init__(self, sources: Sequence[Source], memory: memoryview, audited: Sequence[int]) -> None:
        self.sources, self.places = tuple(sources), places(sources)
        self.memory = memory
        self.error: Exception | None = None
        self._versions = [source.version() for source in sources]
        self._prints = {index: sources[index].fingerprint() for index in audited}
        self._blocks = [
            (index, start, min(start + BLOCK, source.nbytes))
            for index, source in enumerate(self.sources)
            for start in range(0, source.nbytes, BLOCK)
        ]
        self._last = {index: number for number, (index, _, _) in enumerate(self._blocks)}
        self._done = [False] * len(self._blocks)
        self._taken = 0
        self._changed: set[int] = set()
        self._news = threading.Condition()

    def copy_unsettled(self, eager: set[str]) -> None:
        """Copy now what may change before the update; the other blocks keep their order."""
        first = [s.key in eager or not s.settled for s in self.sources]
        now = [number for number, (index, _, _) in enumerate(self._blocks) if first[index]]
        for number in now:
            self._copy(number)

    def help(self) -> bool:
        """Copy the next block that nobody has taken; False where there is none."""
        with self._news:
            while self._taken < len(self._blocks) and self._done[self._taken]:
                self._taken += 1
            if self._taken == len(self._blocks):
                return False
            number = self._taken
            self._taken += 1
        self._copy(number)
        return True

    def finish(self, key: str | None = None) -> None:
        """Return when every block is copied, or those up to the fragment `key`; helps rather than waits."""
        last = len(self._blocks) - 1
        if key is not None:
            index = next(i for i, place in enumerate(self.places) if place.key == key)
            last = self._last.get(index, -1)
        while self._taken <= last and self.help():
            pass
        with self._news:
            self._news.wait_for(lambda: all(self._done[: last + 1]))

    def changed(self) -> tuple[str, ...]:
        """After `finish`: fragments whose copy is not what they were when the snapshot began."""
        for index, before in self._prints.items():
            place = self.places[index]
            copied = self.memory[place.offset : place.offset + place.nbytes]
            if self.sources[index].fingerprint_of(copied) != before:
                self._changed.add(index)
        return tuple(self.places[index].key for index in sorted(self._changed))

    def restless(self) -> tuple[str, ...]:
        """Before the update: audited fragments that changed since the snapshot began, in time for the copy or
        not. Those that aren't settled may.
        """
        return tuple(
            self.places[index].key
            for index, before in self._prints.items()
            if self.sources[index].settled and self.sources[index].fingerprint() != before
        )

    def _copy(self, number: int) -> None:
        index, start, stop = self._blocks[number]
        source, offset = self.sources[index], self.places[index].offset
        try:
            source.copy(start, stop, self.memory[offset + start : offset + stop])
        except Exception as error:  # noqa: BLE001 - the snapshot fails, the training thread must not
            self.error = error
        with self._news:
            if source.version() != self._versions[index]:
                self._changed.add(index)
            self._done[number] = True
            self._news.notify_all()
