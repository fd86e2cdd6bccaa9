"""Choose which pipeline boundaries to log under a budget of bytes, by merging adjacent machines.

Only what crosses between groups is logged, and a failure anywhere in a group replays the whole group: fewer
bytes, longer recovery. This is the selective logging of SWIFT (arXiv 2302.06173, section 5), which merges
greedily; a dynamic programme over prefixes is cheap enough to give the best groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Groups = tuple[tuple[int, int], ...]
"""Half-open ranges of machines that tile them in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundaries:
    """A pipeline's machines in order. `edge_bytes[i]` cross between machine i and i + 1 in one step."""

    machine_s: tuple[float, ...]  # of computation per step
    edge_bytes: tuple[int, ...]
    interval: int  # steps between checkpoints
    bytes_s: float  # of the link inside a group

    def __post_init__(self) -> None:
        assert len(self.edge_bytes) == len(self.machine_s) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Logging:
    """Groups, the most bytes that their log grows to, and the mean seconds that a replay takes."""

    groups: Groups
    log_bytes: int
    recovery_s: float


def exact(boundaries: Boundaries, budget: int) -> Logging:
    """The groups of least mean recovery time whose log fits; of equals those with the smaller log."""
    best: list[list[tuple[int, float, Groups]]] = [[(0, 0.0, ())]]
    for stop in range(1, len(boundaries.machine_s) + 1):
        found: list[tuple[int, float, Groups]] = []
        for start in range(stop):
            crossing = boundaries.edge_bytes[start - 1] * boundaries.interval if start else 0
            weight = _weight(boundaries, start, stop)
            found += [
                (size + crossing, cost + weight, (*groups, (start, stop)))
                for size, cost, groups in best[start]
                if size + crossing <= budget
            ]
        best.append(_undominated(found))
    size, cost, groups = min(best[-1], key=lambda entry: (entry[1], entry[0]))
    return Logging(groups=groups, log_bytes=size, recovery_s=cost)


def curve(boundaries: Boundaries) -> tuple[Logging, ...]:
    """Every exact choice that a budget can buy, the largest log first: bytes against recovery time."""
    budget = _log_bytes(boundaries, [(i, i + 1) for i in range(len(boundaries.machine_s))])
    found: list[Logging] = []
    while budget >= 0:
        choice = exact(boundaries, budget)
        found.append(choice)
        budget = choice.log_bytes - 1
    return tuple(found)


def _weight(boundaries: Boundaries, start: int, stop: int) -> float:
    """A group's share of the mean recovery: how likely the failure is in it, times its replay.

    A failure strikes each machine alike, half-way between two checkpoints in the mean.
    """
    steps = boundaries.interval / 2
    inside = sum(boundaries.edge_bytes[start : stop - 1]) / boundaries.bytes_s
    replay = steps * (sum(boundaries.machine_s[start:stop]) + inside)
    return (stop - start) / len(boundaries.machine_s) * replay


def _log_bytes(boundaries: Boundaries, groups: Sequence[tuple[int, int]]) -> int:
    return sum(boundaries.edge_bytes[stop - 1] for _, stop in groups[:-1]) * boundaries.interval


def _undominated(found: list[tuple[int, float, Groups]]) -> list[tuple[int, float, Groups]]:
    """Without those that another one beats in bytes and seconds."""
    kept: list[tuple[int, float, Groups]] = []
    for entry in sorted(found):
        if not kept or entry[1] < kept[-1][1]:
            kept.append(entry)
    return kept
