"""Copy lane: how bytes get into a slot, at once on the host or on a device's queue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol


class Span(NamedTuple):
    """Bytes start .. stop - 1 of a source, and where in the slot they go."""

    source: Any
    start: int
    stop: int
    offset: int


class CopyLane(Protocol):
    """Copies take effect in the order in which they are begun. Safe from several threads.

    `instant`: they are complete when `copy` returns. A device's are enqueued, and nobody's time is spent on
    waiting for them: `follow` and `order` put them between what the caller enqueues before and after.
    """

    instant: bool

    def follow(self) -> None:
        """What is copied from now on is what the caller's last write leaves."""
        ...

    def copy(self, spans: Sequence[Span], memory: memoryview) -> None:
        """Begin to copy spans that lie one behind the other in the slot."""
        ...

    def order(self) -> None:
        """What the caller writes from now on, it writes when all that was begun is copied."""
        ...

    def wait(self) -> None:
        """Return when all that was begun is in its slot."""
        ...

    def fingerprint(self, source: Any) -> Callable[[], int]:
        """Of a source's contents now; the number may be asked for later, on any thread."""
        ...

    def close(self) -> None:
        """Nothing is begun any more, and all of it has arrived."""
        ...


class AtOnce:
    """Memory to memory, by the thread that calls."""

    instant = True

    def follow(self) -> None:
        return None

    def copy(self, spans: Sequence[Span], memory: memoryview) -> None:
        for source, start, stop, offset in spans:
            source.copy(start, stop, memory[offset : offset + stop - start])

    def order(self) -> None:
        return None

    def wait(self) -> None:
        return None

    def fingerprint(self, source: Any) -> Callable[[], int]:
        found = source.fingerprint()
        return lambda: found

    def close(self) -> None:
        return None
