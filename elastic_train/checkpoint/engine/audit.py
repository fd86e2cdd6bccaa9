"""Choose the fragments whose contents are compared: some writes change no version counter.

All of them in the first snapshots, where the habits of a job show; later a few each time, in turns.
"""

from __future__ import annotations

ALL = 2
TURNS = 128


def audited(number: int, fragments: int) -> tuple[int, ...]:
    """Places of the fragments that snapshot `number` (from 0) compares."""
    if number < ALL:
        return tuple(range(fragments))
    return tuple(range(number % TURNS, fragments, TURNS))
