from __future__ import annotations

from collections.abc import Callable

import pytest

from elastic_train.control.fault_schedule import Fault, FaultSchedule
from elastic_train.observe.journal_records import Record
from elastic_train.testing.simulator import Simulation, simulated_policy

Recorded = Callable[..., list[Record]]


@pytest.fixture
def recorded() -> Recorded:
    """The records of a simulated run under faults."""

    def run(
        *faults: Fault,
        replicas: int = 1,
        max_steps: int = 15,
        every: int = 5,
        seed: int = 0,
        nodes: str = "abcd",
    ) -> list[Record]:
        simulation = Simulation(
            policy=simulated_policy(replicas=replicas, max_steps=max_steps, every=every),
            schedule=FaultSchedule(faults=faults, seed=seed),
            nodes=tuple(nodes),
            records=[],
        )
        simulation.run()
        assert simulation.records is not None
        return simulation.records

    return run
