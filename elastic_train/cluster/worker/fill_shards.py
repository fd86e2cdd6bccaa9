"""Fill new shards from other workers and peer stores, with a bounded number of bytes in flight; prove it.

A rank compares the digest of what it was given with those of the givers. What it kept itself did not move.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any

import numpy as np
import numpy.ma
import ray

from elastic_train.cluster.byte_stream import Arrivals, arrived
from elastic_train.cluster.checkpoint_io import batches
from elastic_train.cluster.ray_calls import answer_while
from elastic_train.errors import StateMismatch
from elastic_train.geometry.digest import MASK
from elastic_train.geometry.fragments import Fragments
from elastic_train.recovery.evidence import Live
from elastic_train.train.member import Member

BATCH_BYTES, AHEAD = 32 * 2**20, 4
"""Bytes that are asked for at once, or one fragment, and how many such requests are on their way."""

Answer = Callable[[], Sequence[np.ndarray]]
Ask = Callable[[Fragments], Answer]
"""Begins to fetch boxes; what it returns waits for their bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What a rank gets of the state of `origin`: its own boxes, and by other holder (a handle) theirs."""

    origin: Live
    own: Fragments
    others: Sequence[tuple[Any, Fragments]]

    def split(self, state: str) -> tuple[Given, Given]:
        """The boxes of this state with what is the rank's own, and the rest."""
        here: list[tuple[Any, Fragments]] = []
        rest: list[tuple[Any, Fragments]] = []
        for handle, boxes in self.others:
            chosen = np.array([boxes.names[key][1] == state for key in boxes.key.tolist()], bool)
            here += [(handle, boxes.take(chosen))] if chosen.any() else []
            rest += [(handle, boxes.take(~chosen))] if not chosen.all() else []
        nothing = self.own.take(np.zeros(len(self.own), bool))
        return (
            Given(origin=self.origin, own=self.own, others=here),
            Given(origin=self.origin, own=nothing, others=rest),
        )


def take(member: Member, given: Given, *, proved: bool = True) -> None:
    """Fill what is given. Unless others will compare it, prove it: StateMismatch where it is not what the
    givers have.
    """
    origin, check = given.origin, member.check

    def coming() -> None:
        check()
        member.filling()

    digests = [
        handle.digest_of.remote(origin.generation, origin.step, boxes)
        for handle, boxes in given.others
        if proved
    ]
    _keep(member, origin, given.own)
    with Arrivals(ray.util.get_node_ip_address()) as arrivals:
        doors = [arrivals.door() for _ in given.others]
        calls = {
            door.ticket: handle.bring.remote(origin.generation, origin.step, boxes, door)
            for door, (handle, boxes) in zip(doors, given.others, strict=True)
        }
        memory = {
            door.ticket: member.forming.memory(boxes)
            for door, (_, boxes) in zip(doors, given.others, strict=True)
        }
        arrived(arrivals, calls, memory, coming, generation=member.forming.shards.generation)
    if not proved:
        return
    came = sum(member.forming.digest_of(boxes) for _, boxes in given.others) & MASK
    there = sum(answer_while(digest, check) for digest in digests) & MASK
    if came != there:
        raise StateMismatch(step=origin.step, detail=f"digest {came:016x}, the holders have {there:016x}")


def check_complete(member: Member, step: int) -> None:
    """StateMismatch where not every byte that is needed was given, or one twice."""
    filled, needed = member.forming.filled_bytes, member.forming.needed_bytes
    if filled != needed:
        raise StateMismatch(step=step, detail=f"{filled} of {needed} bytes were given")


def fill_from(member: Member, origin: Live, own: Fragments, others: Sequence[tuple[Ask, Fragments]]) -> None:
    """Fill from the member's own local state and from the others, all side by side."""
    waiting = deque[tuple[Answer, Fragments]]()
    asked = _in_turns(others)
    for ask, boxes in asked:
        waiting.append((ask(boxes), boxes))
        if len(waiting) == AHEAD:
            break
    _keep(member, origin, own)
    while waiting:
        answer, boxes = waiting.popleft()
        member.forming.fill(boxes, answer())
        member.filling()
        following = next(asked, None)
        if following is not None:
            ask, boxes = following
            waiting.append((ask(boxes), boxes))


def _keep(member: Member, origin: Live, own: Fragments) -> None:
    """Fill from the member's own local state."""
    for boxes in batches(own, BATCH_BYTES):
        member.fill_local(origin.generation, boxes)


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
