from __future__ import annotations

import json
from dataclasses import replace

import pytest

from elastic_train.control.events import StepCommitted
from elastic_train.control.fault_schedule import storm
from elastic_train.observe.goodput import RECENT, goodput
from elastic_train.observe.journal_records import planning
from elastic_train.observe.ledger import ledger
from elastic_train.observe.reconfigurations import history
from elastic_train.observe.run_progress import RunProgress, advance
from elastic_train.observe.run_summary import HEAD, LOSSES, encode_summary, summary_of
from elastic_train.observe.save_report import peers_held, saving
from elastic_train.testing.simulator import Simulation, simulated_policy

pytestmark = pytest.mark.ring0


def stormy(seed: int):
    policy = simulated_policy(stages=seed % 3 == 0, replicas=1 + seed % 2)
    schedule = storm(seed, steps=15, nodes=("a", "b", "c", "d"), ranks=4, faults=5)
    simulation = Simulation(policy=policy, schedule=schedule, records=[])
    simulation.run()
    return simulation.records


@pytest.mark.parametrize("seed", range(12))
def test_a_summary_tells_what_all_records_tell_from_wherever_it_goes_on(seed):
    records = stormy(seed)
    said = None
    for start in range(0, len(records), 37):  # kept and read again, now and then
        said = json.loads(json.dumps(encode_summary(summary_of(records[start : start + 37], said))))
    summary = summary_of([], said)
    progress = RunProgress()
    for record in records:
        progress = advance(progress, record)
    book = ledger(records)
    assert summary.progress == progress
    assert summary.changes.all == history(records)
    assert summary.account.told() == goodput(records)
    assert summary.losses == book.losses
    assert summary.metrics == (dict(book.kept[-1].metrics) if book.kept else {})
    assert summary.last == records[-1]
    for config in ({}, {"checkpoints.every": 5, "checkpoints.peers": "auto"}):
        assert saving(config, summary.telling) == saving(config, records)
    assert peers_held(summary.telling) == peers_held(records)
    assert planning(summary.telling) == planning(records)
    assert summary.head == list(book.kept[-HEAD:])


def test_a_summary_of_nothing_says_so():
    summary = summary_of([])
    assert summary.last is None
    assert summary.telling == ()
    assert summary.account.told() == goodput([])


def test_a_summary_does_not_grow_with_the_age_of_its_run(recorded):
    step = next(r for r in recorded() if isinstance(r.event, StepCommitted))
    summary = summary_of(recorded()[:30])
    sizes = []
    for number in range(20_000):
        event = replace(step.event, step=100 + number, generation=summary.account.generation)
        summary.add(replace(step, event=event))
        if number in (2 * RECENT, 4 * RECENT):  # whole rounds of what is forgotten and merged lie between
            sizes.append(len(json.dumps(encode_summary(summary))))
    assert sizes[1] < 1.1 * sizes[0]
    assert len(summary.losses) == LOSSES
    assert len(summary.account.first) <= 2 * RECENT
