"""A planner that is asked ahead of time, so that an answer is a lookup when it matters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from elastic_train.planner.alternatives import Alternatives, alternatives
from elastic_train.planner.plan import Infeasible, Plan, Seat


class Ready:
    """Answers as the planner does, at once where `prepare` foresaw the question.

    `prepare` may run in a thread beside the calls: they take the last answers that are complete.
    """

    def __init__(self, planner: Callable[[tuple[Seat, ...]], Plan | Infeasible]) -> None:
        self._planner = planner
        self._made: Alternatives | None = None
        self.found = 0  # answers that were ready

    def __call__(self, seats: tuple[Seat, ...], /) -> Plan | Infeasible:
        known = self._made.ready(seats) if self._made is not None else None
        if known is None:
            return self._planner(seats)
        self.found += 1
        return known

    def prepare(self, seats: tuple[Seat, ...]) -> None:
        """Plans for the loss of each node of `seats`, and for one node more with as many workers as most."""
        self._made = alternatives(lambda found, _: self._planner(found), seats, joining=_one_more(seats))


def _one_more(seats: tuple[Seat, ...]) -> tuple[Seat, ...]:
    """A node as most are; none where nodes have failure domains, as nobody knows which it will be in."""
    if not seats or any(seat.domain for seat in seats):
        return ()
    sizes = Counter(Counter(seat.node for seat in seats).values())
    return tuple(Seat(worker=f"joining {i}", node="joining") for i in range(sizes.most_common(1)[0][0]))
