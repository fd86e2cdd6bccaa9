"""Several simulated runs on one cluster: one clock, the same nodes, no more workers on a node than fit.

Each run takes every slot that it sees for its own, as on a cluster, where a worker's process waits until
there is room. Machines come and go for all of them; whatever else goes wrong is one run's.
"""

from __future__ import annotations

from collections.abc import Sequence

from elastic_train.control.fault_schedule import FaultSchedule
from elastic_train.control.policy import Policy
from elastic_train.control.states import Ended
from elastic_train.testing.simulated_faults import Weather
from elastic_train.testing.simulated_group import SimulatedWorker
from elastic_train.testing.simulated_time import Clock
from elastic_train.testing.simulator import Simulation


class SharedSimulation:
    """Runs of these policies, each in weather of its own, that begin `apart_s` one after the other."""

    def __init__(
        self,
        runs: Sequence[tuple[Policy, FaultSchedule | Weather]],
        *,
        seed: int,
        nodes: tuple[str, ...] = ("a", "b", "c", "d"),
        apart_s: float = 0.0,
        limit_s: float = 6000.0,
    ) -> None:
        self.seed, self.clock = seed, Clock(seed)
        self._limit_s, self._apart_s = limit_s, apart_s
        self.runs = [
            Simulation(policy=policy, schedule=schedule, nodes=nodes, name=f"r{number}", shared=self.clock)
            for number, (policy, schedule) in enumerate(runs)
        ]
        self._begun: list[Simulation] = []
        for run in self.runs:
            run.cluster.has_room = lambda worker, run=run: self._has_room(run, worker)

    def run(self) -> list[Ended]:
        """Until all have ended. Raises AssertionError, with the seed, where an invariant does not hold."""
        try:
            for number, run in enumerate(self.runs):
                self.clock.after(number * self._apart_s, lambda run=run: self._begin(run))
            left = list(self.runs)
            while left:
                assert self.clock.now < self._limit_s, "every run ends when capacity allows"
                assert self.clock.step()
                for run in [run for run in left if run in self._begun and run.has_ended]:
                    left.remove(run)
                    self._put_back(run)
            return [run.ended() for run in self.runs]
        except AssertionError as broken:
            raise AssertionError(f"seed {self.seed}: {broken}") from broken

    def _begin(self, run: Simulation) -> None:
        """On the nodes that are there by now."""
        if self._begun:
            run.nodes = tuple(self._begun[0].cluster.nodes)
        run.start()
        for other in self._begun:
            other.beside.append(run)
            run.beside.append(other)
        self._begun.append(run)

    def _has_room(self, run: Simulation, worker: SimulatedWorker) -> bool:
        node = run.cluster.nodes.get(worker.node)
        there = sum(
            w.ready and w.died is None and w.node == worker.node
            for one in self.runs
            for w in one.cluster.workers.values()
        )
        assert node is None or there <= node.slots, "no more workers are on a node than fit"
        return node is not None and there < node.slots

    def _put_back(self, run: Simulation) -> None:
        """The processes of a run that ended are gone, and what its controller asked storage for is void."""
        run.cluster.storage.fence += 1
        for worker in run.cluster.workers.values():
            worker.died = self.clock.now if worker.died is None else worker.died
