"""Plans for what is likely to come next, made beforehand, so that planning is a lookup when it matters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from elastic_train.planner.plan import Infeasible, Plan, Seat

Searching = Callable[[tuple[Seat, ...], Plan | None], Plan | Infeasible]
"""Seats, and the plan whose shards are held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternatives:
    """A planner that knows some answers: the plan without each node, and with one node more.

    `grown` is the answer for seats of `joining` workers, whose names were not known yet. Seats in another
    order may have another answer, so they are no known question.
    """

    search: Searching
    seats: tuple[Seat, ...]
    previous: Plan | None
    without: Mapping[str, Plan | Infeasible]  # by the node that is gone
    joining: tuple[Seat, ...] = ()
    grown: Plan | Infeasible | None = None

    def __call__(self, seats: tuple[Seat, ...], previous: Plan | None = None, /) -> Plan | Infeasible:
        ready = self.ready(seats) if previous == self.previous else None
        return self.search(seats, previous) if ready is None else ready

    def ready(self, seats: Sequence[Seat]) -> Plan | Infeasible | None:
        """The plan made for exactly these seats; None where none was."""
        seats, known = tuple(seats), set(self.seats)
        gone = known.difference(seats)
        if gone and len(nodes := {seat.node for seat in gone}) == 1:
            (node,) = nodes
            left = tuple(seat for seat in self.seats if seat.node != node)
            return self.without.get(node) if seats == left else None
        new = seats[len(self.seats) :]
        if seats[: len(self.seats)] == self.seats and self._like(frozenset(new)):
            return self._renamed(dict(zip(self.joining, new, strict=True)))
        return None

    def _like(self, new: frozenset[Seat]) -> bool:
        """Whether the new seats are what was expected, names apart."""
        if not new or len(new) != len(self.joining) or len({seat.node for seat in new}) != 1:
            return False
        known = {seat.node for seat in self.seats}
        kinds = [sorted((s.domain, s.speed) for s in group) for group in (new, self.joining)]
        return kinds[0] == kinds[1] and not known & {seat.node for seat in new}

    def _renamed(self, names: Mapping[Seat, Seat]) -> Plan | Infeasible | None:
        if not isinstance(self.grown, Plan):
            return self.grown
        by_worker = {seat.worker: new for seat, new in names.items()}
        seats = zip(self.grown.workers, self.grown.nodes, strict=True)
        taken = [(by_worker[w].worker, by_worker[w].node) if w in by_worker else (w, n) for w, n in seats]
        return replace(self.grown, workers=tuple(w for w, _ in taken), nodes=tuple(n for _, n in taken))


def alternatives(
    search: Searching, seats: Sequence[Seat], plan: Plan | None = None, *, joining: Sequence[Seat] = ()
) -> Alternatives:
    """Answers for the loss of each node of `seats`, and for `joining` seats of one more node."""
    nodes = dict.fromkeys(seat.node for seat in seats)
    return Alternatives(
        search=search,
        seats=tuple(seats),
        previous=plan,
        without={node: search(tuple(s for s in seats if s.node != node), plan) for node in nodes},
        joining=tuple(joining),
        grown=search((*seats, *joining), plan) if joining else None,
    )
