from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_train.control.changes import Change
from elastic_train.control.events import Cause, Hung
from elastic_train.control.fault_schedule import (
    AddNode,
    DrainNode,
    FaultSchedule,
    KillController,
    KillNode,
    KillRank,
    Moment,
    StopRank,
    storm,
)
from elastic_train.observe.journal_records import Record, wall_text
from elastic_train.observe.ledger import ledger
from elastic_train.observe.reconfigurations import history, table
from elastic_train.testing.simulator import Simulation, simulated_policy

pytestmark = pytest.mark.ring0


def simulated(stop_at: float | None) -> list[Record]:
    simulation = Simulation(
        policy=simulated_policy(replicas=2, max_steps=15, every=5),
        schedule=FaultSchedule(faults=(), seed=0),
        nodes=tuple("abcd"),
        stop_at=stop_at,
        records=[],
    )
    simulation.run()
    assert simulation.records is not None
    return simulation.records


def test_an_undisturbed_run_has_no_history(recorded):
    assert history(recorded()) == ()
    assert table(()) == [("cause", "at step", "workers", "from", "seconds", "steps lost")]


@pytest.mark.parametrize("seed", range(8))
def test_a_worker_that_comes_up_while_the_first_group_forms_is_no_change_of_it(recorded, seed):
    assert history(recorded(nodes="abcde", seed=seed)) == ()


def test_losses_are_told_with_cause_and_cost(recorded):
    """Two losses after steps 7 and 9 with a checkpoint at 5 cost 2 and 4 steps."""
    reported = history(
        recorded(KillRank(when=Moment(step=8), rank=1), KillRank(when=Moment(step=10), rank=0))
    )
    losses = [r for r in reported if not r.graceful]
    assert [(r.step, r.lost, r.source) for r in losses] == [(7, 2, "storage"), (9, 4, "storage")]
    assert all(r.cause.startswith(("death of w", "collective error")) for r in losses)
    assert all(r.seconds is not None and 0 < r.seconds < 60 for r in losses)
    assert losses[0].before == 4


@pytest.mark.parametrize("seed", range(4))
def test_a_loss_after_the_last_step_lasts_until_the_run_ended(recorded, seed):
    schedule = KillRank(when=Moment(step=15, phase="save"), rank=1)
    records = recorded(schedule, replicas=2, seed=seed)
    loss = next(r for r in history(records) if not r.graceful)
    assert loss.seconds is not None
    assert loss.at + loss.seconds == records[-1].seconds


def test_the_cause_is_the_first_that_is_not_a_collectives(recorded):
    reported = history(recorded(KillRank(when=Moment(step=8), rank=1), seed=4))
    assert reported[0].cause == "death of w0002"


def test_a_silent_rank_is_named(recorded):
    reported = history(recorded(StopRank(when=Moment(step=8), rank=1), replicas=2))
    assert reported[0].cause == "silence of w0002"
    assert (reported[0].source, reported[0].lost) == ("live", 0)


@pytest.mark.parametrize(("worker", "said"), [("w0002", "hang of w0002"), ("", "hang at step 8")])
def test_a_hang_is_told_in_few_words(recorded, worker, said):
    records = recorded(KillRank(when=Moment(step=8), rank=1), replicas=2)
    first = next(r for r in records if r.phase == "settling")
    cause = Cause(kind="hang", detail="w0002 (rank 1, node b) has been in forward of step 8 for 31 s", step=8)
    hung = Hung(at=0.0, generation=1, worker=worker, cause=cause, stacks=())
    change = Change(kind="hang", workers=(worker,) if worker else (), step=8, cause="hang")
    reported = history([replace(r, event=hung, change=change) if r is first else r for r in records])
    assert reported[0].cause == said


def test_growth_and_drain_are_graceful_and_lose_nothing(recorded):
    reported = history(
        recorded(
            KillNode(when=Moment(step=4), node="c"),
            AddNode(when=Moment(step=8), node="e"),
            DrainNode(when=Moment(step=25), node="a", notice_s=60.0),
            replicas=2,
            max_steps=40,
        )
    )
    graceful = [r for r in reported if r.graceful]
    assert [(r.cause, r.before, r.after) for r in graceful] == [("growth", 3, 4), ("drain", 4, 3)]
    assert all(r.lost == 0 and r.source == "live" for r in graceful)


def test_a_new_controller_that_finds_its_group_alive_is_no_reconfiguration(recorded):
    assert history(recorded(KillController(when=Moment(step=8)), replicas=2)) == ()


@pytest.mark.parametrize(("stop_at", "said"), [(None, "submitted again"), (30.0, "stop")])
def test_a_run_that_is_submitted_again_neither_grew_nor_lost_anybody(stop_at, said):
    first, then = (simulated(stop_at=at) for at in (stop_at, None))
    outcome = first[-1].ended
    assert outcome is not None
    assert outcome[0] == ("stopped" if stop_at else "finished")
    reported = history([*first, *(replace(r, wall=wall_text(r.seconds + 1000.0)) for r in then)])
    assert [change.cause for change in reported] == [said]


def test_a_death_while_no_controller_was_there_is_no_fault_of_the_next_one(recorded):
    faults = (KillController(when=Moment(step=7)), KillRank(when=Moment(step=7, phase="vote"), rank=1))
    reported = history(recorded(*faults, replicas=2, seed=2))
    assert reported[0].cause == "death of w0002, found by a new controller"
    assert (reported[0].step, reported[0].lost) == (7, 0), "what was committed meanwhile counts"


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_every_group_but_the_first_has_a_cause(recorded, seed):
    faults = storm(seed, steps=15, nodes=("a", "b", "c", "d"), ranks=4, faults=5).faults
    records = recorded(*faults, seed=seed, replicas=1 + seed % 2)
    reported = history(records)
    assert all(r.cause and r.lost >= 0 and r.before >= 2 for r in reported)
    assert [r.generation for r in reported] == sorted({r.generation for r in reported})
    assert sum(r.lost for r in reported) == len(ledger(records).superseded), "each step that was run again"


def test_the_table_has_a_row_for_each(recorded):
    records = recorded(KillRank(when=Moment(step=8), rank=1))
    rows = table(history(records))
    assert len(rows) == 1 + len(history(records))
    assert rows[1][2].startswith("4 -> ")
    unfinished = table(history(records[: next(r.seq for r in records if r.phase == "settling") + 1]))
    assert unfinished[1][2:5] == ("4 -> ?", "?", "?")
