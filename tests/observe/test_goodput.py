from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_train.control.fault_schedule import DrainNode, FaultSchedule, KillRank, Moment, storm
from elastic_train.observe.goodput import Goodput, goodput, words
from elastic_train.observe.journal_records import wall_text
from elastic_train.testing.simulator import Simulation, simulated_policy

pytestmark = pytest.mark.ring0


def test_an_undisturbed_run_loses_its_start_and_its_last_save(recorded):
    account = goodput(recorded())
    assert account.good_s == 30.0
    assert {cause for cause, _ in account.badput} == {"start", "between steps"}
    assert account.wall_s == pytest.approx(account.good_s + sum(s for _, s in account.badput))
    assert account.share == pytest.approx(30.0 / account.wall_s)


def test_steps_count_with_their_first_execution_and_again_as_badput(recorded):
    account = goodput(recorded(KillRank(when=Moment(step=8), rank=1)))
    badput = dict(account.badput)
    assert account.good_s == 30.0
    assert badput["steps run again"] == 4.0
    assert badput["recovery"] > 0
    assert account.wall_s == pytest.approx(account.good_s + sum(badput.values()))


def test_a_graceful_switch_has_its_own_cause(recorded):
    account = goodput(recorded(DrainNode(when=Moment(step=6), node="a", notice_s=60.0), replicas=2))
    assert set(dict(account.badput)) >= {"switch"}
    assert "recovery" not in dict(account.badput)


def test_the_wait_before_the_first_record_counts_from_submission(recorded):
    records = recorded()
    early = goodput(records, submitted=records[0].seconds - 100.0)
    assert early.wall_s == pytest.approx(goodput(records).wall_s + 100.0)
    assert dict(early.badput)["start"] == pytest.approx(dict(goodput(records).badput)["start"] + 100.0)


def test_time_between_an_end_and_the_next_start_is_not_running(recorded):
    first = recorded()
    again = [replace(r, wall=wall_text(r.seconds + 1000.0)) for r in first[:3]]
    badput = dict(goodput([*first, *again]).badput)
    assert badput["not running"] == pytest.approx(1000.0 - first[-1].seconds)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_the_account_adds_up_to_the_wall_time(recorded, seed):
    faults = storm(seed, steps=15, nodes=("a", "b", "c", "d"), ranks=4, faults=5).faults
    account = goodput(recorded(*faults, seed=seed, replicas=1 + seed % 2))
    assert account.wall_s == pytest.approx(account.good_s + sum(s for _, s in account.badput))
    assert 0.0 < account.share < 1.0


def test_a_run_that_is_stopped_before_it_trains_only_started():
    simulation = Simulation(
        policy=simulated_policy(), schedule=FaultSchedule(faults=()), records=[], stop_at=1.0
    )
    simulation.run()
    assert goodput(simulation.records).badput == (("start", 1.0),)


def test_a_run_that_never_began_has_no_goodput():
    assert goodput([]) == Goodput(wall_s=0.0, good_s=0.0, badput=())
    assert goodput([]).share == 0.0


def test_the_account_is_one_line_for_people():
    account = Goodput(wall_s=20.0, good_s=15.0, badput=(("start", 4.0), ("recovery", 1.0)))
    assert words(account) == (
        "goodput 75%: 15.0 of 20.0 s on steps that were kept; start 4.0 s, recovery 1.0 s"
    )
    assert words(Goodput(wall_s=1.0, good_s=1.0, badput=())).endswith("that were kept")
