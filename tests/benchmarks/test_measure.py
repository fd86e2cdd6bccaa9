"""What the recovery benchmark takes out of a journal and out of a peer's notes."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.paired import Middle, middle
from benchmarks.peers import notes
from benchmarks.recovery import run
from elastic_train.control.events import Cause, GroupBroken, GroupReady, StepCommitted, Tick
from elastic_train.observe.journal_records import FormedGroup, Record, wall_text

pytestmark = pytest.mark.ring0

KILLED_AT = 1000.0


def committed(at: float, generation: int, step: int) -> Record:
    return noted(
        at,
        StepCommitted(
            at=0.0,
            generation=generation,
            step=step,
            loss=1.0,
            tokens=1.0,
            grad_norm=1.0,
            skipped=False,
            seconds=0.1,
            vote=(),
        ),
    )


def noted(at: float, event: Any, formed: FormedGroup | None = None) -> Record:
    return Record(seq=0, wall=wall_text(KILLED_AT + at), event=event, reason="", phase="", formed=formed)


def formed(at: float, generation: int, workers: int, step: int, source: Any = "live") -> Record:
    names = tuple(f"w{i}" for i in range(workers))
    group = FormedGroup(
        generation=generation, step=step, source=source, mesh="", dp=workers, workers=names, nodes=names
    )
    return noted(at, Tick(at=0.0), group)


def broken(at: float, generation: int) -> Record:
    cause = Cause(kind="death", detail="")
    return noted(at, GroupBroken(at=0.0, generation=generation, worker="w0", cause=cause))


def ready(at: float, generation: int) -> Record:
    return noted(at, GroupReady(at=0.0, generation=generation, step=0, seconds=0.0))


def test_only_a_group_of_the_planned_size_ends_the_recovery() -> None:
    records = [
        formed(-9, 1, 4, 0, "fresh"),
        committed(-1, 1, 65),
        committed(0.1, 1, 66),
        broken(0.2, 1),
        formed(0.3, 2, 3, 66),
        ready(0.5, 2),
        committed(0.75, 2, 67),
        formed(1.0, 3, 4, 67),
        ready(1.25, 3),
        committed(1.5, 3, 68),
    ]
    found = run.measure(records, KILLED_AT, planned=4)
    assert found is not None
    assert found["kill_to_step_s"] == 1.5
    assert found["first_step"] == 68
    assert found["kill_to_ready_s"] == 1.25
    assert run.measure(records, KILLED_AT, planned=2) is None


def test_steps_that_a_group_runs_again_are_counted() -> None:
    records = [
        formed(-9, 1, 4, 0, "fresh"),
        committed(-1, 1, 65),
        broken(0.2, 1),
        formed(0.3, 2, 4, 60, "storage"),
        ready(0.5, 2),
        committed(0.75, 2, 61),
    ]
    found = run.measure(records, KILLED_AT, planned=4)
    assert found is not None
    assert (found["steps_redone"], found["from"]) == (5, "storage")


def test_a_peer_is_back_when_the_last_rank_ended_a_step_and_regained_when_it_is_a_new_one() -> None:
    def note(at: float, kind: str, step: int, rank: int, pid: int) -> dict[str, Any]:
        return {"at": KILLED_AT + at, "kind": kind, "step": step, "rank": rank, "world": 2, "pid": pid}

    old = [note(-1.0, "step", 12, rank, 10 + rank) for rank in (0, 1)] + [note(0.1, "step", 13, 0, 10)]
    new = [
        note(at, kind, step, rank, 20 + rank)
        for at, kind, step in ((5.0, "entered", 0), (6.0, "ready", 11), (7.0, "step", 12), (8.0, "step", 13))
        for rank in (0, 1)
    ]
    late = [note(9.0, "step", 14, 0, 20)]
    found = notes.measure(old + new + late, KILLED_AT, planned=2)
    assert found is not None
    assert (found["kill_to_step_s"], found["first_step"], found["steps_redone"]) == (7.0, 12, 2)
    assert found["kill_to_regained_s"] is None
    found = notes.measure([*old, *new, *late, note(9.5, "step", 14, 1, 21)], KILLED_AT, planned=2)
    assert found is not None
    assert found["kill_to_regained_s"] == 9.5


def test_the_middle_of_pairs_is_as_sure_as_the_sign_test_says() -> None:
    assert middle([*range(40)]) == Middle(median=19.5, low=13, high=26), "ranks 14 and 27 of 40"
    assert middle([3.0, 1.0, 2.0]) == Middle(median=2.0, low=None, high=None), "three pairs prove nothing"
