"""Simulated preparations: the next group is made ready beside the running one, and ends in one event."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from elastic_train.control.commands import Dismiss, Form, Prepare
from elastic_train.control.events import Cause, NotPrepared, Prepared

if TYPE_CHECKING:
    from elastic_train.testing.simulated_cluster import SimulatedCluster

Key = tuple[int, int]
"""The generation that is made ready, and the preparation's number."""


@dataclass(slots=True)
class SimulatedPreparations:
    """What workers hold of preparations."""

    cluster: SimulatedCluster
    held: dict[Key, Prepare] = field(default_factory=dict[Key, Prepare])
    ready: set[Key] = field(default_factory=set[Key])
    begun: int = 0
    taken: int = 0

    def order(self, command: Prepare | Dismiss) -> None:
        key = command.generation, command.number
        if isinstance(command, Dismiss):
            self.held = {k: v for k, v in self.held.items() if command.number and k != key}
            return
        self._check_forgotten()
        clock = self.cluster.clock
        self.held[key] = command
        self.begun += 1
        takes = clock.draw.uniform(0.5, 6.0)
        clock.after(clock.draw.uniform(0.0, takes), lambda: self.cluster.moment(command.step, "preparing"))
        clock.after(takes, lambda: self._end(command))

    def take(self, form: Form) -> bool:
        """Whether a group that forms takes up what was made ready for it. Nothing is left then."""
        key = form.generation, form.prepared
        if form.prepared:
            assert key in self.ready & self.held.keys(), "only what is ready is taken up"
            assert self.held.pop(key).plan == form.plan, "a group is formed as it was made ready"
            self.taken += 1
        self._check_forgotten()
        return form.prepared > 0

    def _end(self, command: Prepare) -> None:
        """Every preparation ends in one event, whoever still waits for it."""
        cluster, key = self.cluster, (command.generation, command.number)
        workers = [cluster.workers[name] for name in command.plan.workers]
        now, beside, number = cluster.clock.now, command.beside, command.number
        lost = [w.name for w in workers if not w.responds(now) or not cluster.network.hears(w.node)]
        if lost or key not in self.held:
            cause = Cause(kind="collective", detail=f"{lost[0]} is gone" if lost else "it was dismissed")
            cluster.tell(cluster.term, NotPrepared(at=0.0, generation=beside, number=number, cause=cause))
            return
        self.ready.add(key)
        cluster.tell(cluster.term, Prepared(at=0.0, generation=beside, number=number, seconds=1.0))

    def _check_forgotten(self) -> None:
        assert not self.held, "what was made ready is taken up or forgotten"
