"""What the switch benchmark takes out of a journal and out of a peer's notes."""

from __future__ import annotations

import os
from typing import Any

import pytest

from benchmarks.peers import ray_train_switch
from benchmarks.switch.cases import CASES
from benchmarks.switch.peak_memory import PeakMemory
from benchmarks.switch.run import Asked, measured
from elastic_train.observe.journal_records import Record
from tests.benchmarks.test_measure import KILLED_AT, committed, formed, ready

pytestmark = pytest.mark.ring0


def paced(generation: int, first: int, *moments: float) -> list[Record]:
    return [committed(at, generation, first + i) for i, at in enumerate(moments)]


def test_a_gap_lies_between_the_last_step_of_the_old_group_and_the_first_of_the_new_one() -> None:
    records = [
        formed(-9, 1, 2, 0, "fresh"),
        *paced(1, 1, -8, -6, -5, -4, -3, -2, -1),  # steps of 1 s
        *paced(1, 8, 1, 3, 5, 7, 9),  # of 2 s while the newcomer starts
        formed(9.5, 2, 3, 12),
        ready(10, 2),
        *paced(2, 13, 11.5, 12, 12.5, 13, 13.5),
    ]
    (found,) = measured(records, [Asked("growth", KILLED_AT, 3)])
    assert found["gap_s"] == pytest.approx(2.5)
    assert found["gap_steps"] == pytest.approx(2.5)
    assert (found["form_s"], found["first_step_s"]) == (pytest.approx(1.0), pytest.approx(1.5))
    assert found["speed_beside"] == pytest.approx(0.5)
    assert found["step_after_s"] == pytest.approx(0.5)
    assert found["asked_to_step_s"] == pytest.approx(11.5)


def test_the_memory_of_a_change_is_told_by_what_it_takes_beside_steps() -> None:
    records = [
        formed(-9, 1, 2, 0),
        *paced(1, 1, -2, -1, 1),
        formed(2, 2, 3, 3),
        ready(2, 2),
        *paced(2, 4, 3, 4),
    ]
    before = {"w0": 3_000_000_000, "w1": 2_000_000_000}
    change = {"w0": 3_100_000_000, "w1": 2_500_000_000, "w2": 1_500_000_000}
    (found,) = measured(records, [Asked("growth", KILLED_AT, 3, 1, before)], {2: change})
    assert (found["step_gb"], found["change_more_gb"], found["newcomer_gb"]) == (3.0, 0.5, 1.5)


def test_a_peak_is_that_since_the_mark() -> None:
    memory = PeakMemory()
    memory.add("me", os.getpid())
    memory.add("gone", 0)
    held = bytearray(200 << 20)
    high = memory.peaks()["me"]
    del held
    memory.mark()
    low = memory.peaks()
    assert low.keys() == {"me"}
    assert high - low["me"] > 150 << 20


def test_a_change_to_another_size_than_was_asked_for_is_none() -> None:
    records = [formed(-9, 1, 2, 0), *paced(1, 1, 1, 2), formed(3, 2, 1, 2), ready(3, 2), *paced(2, 3, 4, 5)]
    assert "problem" in measured(records, [Asked("growth", KILLED_AT, 3)])[0]
    assert "problem" not in measured(records, [Asked("drain", KILLED_AT, 1)])[0]


def test_of_a_peer_steps_that_are_run_again_are_told_apart() -> None:
    def step(at: float, number: int, world: int) -> dict[str, Any]:
        return {"at": at, "kind": "step", "step": number, "rank": 0, "world": world}

    notes = [*(step(i, i, 2) for i in range(1, 15)), *(step(24 + i, 10 + i, 3) for i in range(1, 9))]
    found = ray_train_switch.measured(notes)
    assert (found["gap_s"], found["gap_to_fresh_s"], found["steps_redone"]) == (11, 15, 4)
    assert "problem" in ray_train_switch.measured(notes[:5])


def test_a_drain_of_as_many_as_came_at_hand_is_seen_though_as_many_train_afterwards() -> None:
    records = [
        formed(-9, 1, 2, 0, "fresh"),
        *paced(1, 1, -5, -4, -3, -2, -1, 1),
        formed(1.2, 2, 2, 6),
        ready(1.4, 2),
        *paced(2, 7, 2, 3, 4, 5),
    ]
    (found,) = measured(records, [Asked("migration", KILLED_AT, 2)])
    assert (found["way"], found["gap_s"]) == ("migration", pytest.approx(1.0))


@pytest.mark.parametrize("name", CASES)
def test_a_case_is_repeated_where_its_changes_lead_back_to_its_first_group(name: str) -> None:
    case = CASES[name]
    back = case.sizes[-1] == case.workers and not case.slow
    assert len(case.turns(3)) == len(case.changes) * (3 if back else 1)
    assert min(case.sizes) > 0
    slots = case.workers + case.spare
    for change in case.changes:
        slots += change.adds - change.drains
        assert slots >= case.workers - case.slow
