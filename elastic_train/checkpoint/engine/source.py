"""Source of a snapshot copy: the bytes of a tensor, which only the update should change."""

from __future__ import annotations

from typing import Protocol


class Source(Protocol):
    """One fragment. `settled` is False where something beside the update writes to it, as a forward to a
    buffer: such a source is copied before training goes on.

    `version` changes with each write that the owner of the memory sees. `fingerprint` is of the contents,
    also where `version` is blind; `fingerprint_of` is the same number of a copy.
    """

    @property
    def key(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def settled(self) -> bool: ...
    def version(self) -> int: ...
    def fingerprint(self) -> int: ...
    def fingerprint_of(self, copied: memoryview) -> int: ...
    def copy(self, start: int, stop: int, target: memoryview) -> None:
        """Put bytes start .. stop - 1 into `target`; they are there when it returns."""
        ...
