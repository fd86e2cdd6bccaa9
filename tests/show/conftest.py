from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from elastic_train.control.events import StepCommitted
from elastic_train.control.fault_schedule import AddNode, DrainNode, FaultSchedule, KillNode, KillRank, Moment
from elastic_train.observe.journal_records import Record, wall_text
from elastic_train.testing.simulator import Simulation, simulated_policy

BEGAN = 1.7e9


@pytest.fixture(scope="session")
def rough() -> list[Record]:
    """A simulated run of 60 steps with a lost node, a lost worker, a drain and a newcomer."""
    schedule = FaultSchedule(
        faults=(
            KillNode(when=Moment(step=12), node="b"),
            AddNode(when=Moment(step=20), node="e"),
            DrainNode(when=Moment(step=32), node="c", notice_s=30.0),
            KillRank(when=Moment(step=47), rank=1),
        ),
        seed=3,
    )
    policy = simulated_policy(replicas=2, max_steps=60, every=10)
    simulation = Simulation(policy=policy, schedule=schedule, nodes=tuple("abcd"), records=[])
    simulation.run()
    return [_lively(r) for r in simulation.records or ()]


def _lively(record: Record) -> Record:
    event = record.event
    if isinstance(event, StepCommitted):
        event = replace(event, loss=2.0 + 5.0 * math.exp(-event.step / 20), rates=(1e-3 / event.step,))
    return replace(record, event=event, wall=wall_text(BEGAN + record.seconds))


@pytest.fixture(scope="session")
def long_run(rough: list[Record]) -> Callable[[int], Iterator[Record]]:
    """So many steps of the run before it ends."""
    until = next(n for n, r in enumerate(rough) if isinstance(r.event, StepCommitted) and r.event.step == 55)
    step = rough[until]
    assert isinstance(step.event, StepCommitted)
    draw = random.Random(0)

    def records(count: int) -> Iterator[Record]:
        yield from rough[: until + 1]
        for number in range(1, count + 1):
            event = replace(step.event, step=step.event.step + number, loss=2.0 + draw.gauss(0.0, 0.1))
            yield replace(step, event=event, wall=wall_text(step.seconds + 2.0 * number))

    return records
