"""Silent data corruption: find the replica that is wrong where the digests of replicas differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

Digests = Mapping[str, int]
"""One rank's digest of what it holds together with others, by the name of that set of ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`wrong` ranks are outvoted by their replicas. `doubtful` ones have no majority."""

    wrong: tuple[int, ...] = ()
    doubtful: tuple[int, ...] = ()


def judge(reported: Mapping[int, Digests], late: Collection[int] = ()) -> Verdict:
    """Compares the digests that ranks reported: the majority of each set of replicas is right.

    Ranks that are `late` were given theirs by the others a moment ago, and have no voice.
    """
    wrong: set[int] = set()
    doubtful: set[int] = set()
    for name in {name for own in reported.values() for name in own}:
        members = {rank: own[name] for rank, own in reported.items() if name in own}
        if len(set(members.values())) == 1:
            continue
        voices = [own for rank, own in members.items() if rank not in late]
        digest, count = Counter(voices).most_common(1)[0] if voices else (0, 0)
        if 2 * count > len(voices):
            wrong |= {rank for rank, own in members.items() if own != digest}
        else:
            doubtful |= set(members)
    return Verdict(wrong=tuple(sorted(wrong)), doubtful=tuple(sorted(doubtful - wrong)))
