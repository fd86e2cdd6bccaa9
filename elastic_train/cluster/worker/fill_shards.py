"""Fill new shards from other workers and peer stores with a bounded number of bytes in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, zip_longest
from typing import Any

import numpy as np

from elastic_train.cluster.checkpoint_io import batches
from elastic_train.cluster.ray_calls import answer_while
from elastic_train.geometry.fragments import Fragments
from elastic_train.recovery.evidence import Live
from elastic_train.train.member import Member

BATCH_BYTES, AHEAD = 32 * 2**20, 4
"""Bytes that are asked for at once, or one fragment, and how many such requests are on their way."""

Answer = Callable[[], Sequence[np.ndarray]]
Ask = Callable[[Fragments], Answer]
"""Begins to fetch boxes; what it returns waits for their bytes."""


def fill_from(member: Member, origin: Live, own: Fragments, others: Sequence[tuple[Ask, Fragments]]) -> None:
    """Fill from the member's own local state and from the others, all side by side."""
    waiting = deque[tuple[Answer, Fragments]]()
    asked = _in_turns(others)
    for ask, boxes in asked:
        waiting.append((ask(boxes), boxes))
        if len(waiting) == AHEAD:
            break
    for boxes in batches(own, BATCH_BYTES):
        member.fill_local(origin.generation, boxes)
    while waiting:
        answer, boxes = waiting.popleft()
        member.forming.fill(boxes, answer())
        following = next(asked, None)
        if following is not None:
            ask, boxes = following
            waiting.append((ask(boxes), boxes))


def reads(handle: Any, origin: Live, check: Callable[[], None]) -> Ask:
    """Reads out of the memory of a worker or a peer store. `check` raises where the group was broken
    meanwhile: a holder that is cut off gives no answer for a minute.
    """

    def ask(boxes: Fragments) -> Answer:
        ref = handle.read.remote(origin.generation, origin.step, boxes)
        return lambda: answer_while(ref, check)

    return ask


def _in_turns(others: Sequence[tuple[Ask, Fragments]]) -> Iterator[tuple[Ask, Fragments]]:
    """The first batch of each, then the second of each, and so on."""
    columns = [[(ask, some) for some in batches(boxes, BATCH_BYTES)] for ask, boxes in others]
    return (each for each in chain.from_iterable(zip_longest(*columns)) if each is not None)
