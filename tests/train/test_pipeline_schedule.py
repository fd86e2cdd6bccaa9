"""The order of a stage's passes: what it has to wait for, how much it keeps, and how long a step takes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.planner.plan import Schedule
from elastic_train.train.step.pipeline_schedule import Pass, passes_of

pytestmark = pytest.mark.ring0

SIZES = st.tuples(st.integers(1, 6), st.integers(0, 12))
SECONDS = {"forward": 1.0, "backward": 1.0, "weights": 1.0}


def order(schedule: Schedule, jobs: int, stages: int) -> list[list[Pass]]:
    return [list(passes_of(schedule, jobs, stage=s, stages=stages)) for s in range(stages)]


def step_seconds(passes: list[list[Pass]], seconds: dict[str, float]) -> float:
    """When the last stage is done, if each begins a pass as soon as its input is there."""
    stages, done = len(passes), {}
    clocks, at = [0.0] * stages, [0] * stages
    while any(at[s] < len(passes[s]) for s in range(stages)):
        moved = False
        for s in range(stages):
            if at[s] == len(passes[s]):
                continue
            kind, job = passes[s][at[s]]
            other = {"forward": s - 1, "backward": s + 1, "weights": -1}[kind]
            needs = (kind, other, job) if 0 <= other < stages else None
            if needs is not None and needs not in done:
                continue
            clocks[s] = max(clocks[s], done.get(needs, 0.0)) + seconds[kind]
            done[kind, s, job] = clocks[s]
            at[s], moved = at[s] + 1, True
        assert moved, "the stages wait for each other"
    return max(clocks)


@pytest.mark.parametrize("schedule", ["1F1B", "ZeroBubble"])
@given(SIZES)
def test_every_job_runs_once_in_order_and_no_stage_waits_for_ever(schedule: Schedule, size: tuple[int, int]):
    stages, jobs = size
    passes = order(schedule, jobs, stages)
    kinds = ("forward", "backward") if schedule == "1F1B" else ("forward", "backward", "weights")
    for stage in passes:
        for kind in kinds:
            assert [job for k, job in stage if k == kind] == list(range(jobs))
        for job in range(jobs):
            assert [k for k, j in stage if j == job] == list(kinds)
    step_seconds(passes, SECONDS)


@given(SIZES)
def test_a_split_backward_leaves_a_third_of_the_wait(size: tuple[int, int]) -> None:
    stages, jobs = size[0], size[0] + size[1]
    whole = {"forward": 1.0, "backward": 2.0, "weights": 0.0}
    assert step_seconds(order("1F1B", jobs, stages), whole) == 3 * jobs + 3 * (stages - 1)
    assert step_seconds(order("ZeroBubble", jobs, stages), SECONDS) == 3 * jobs + stages - 1


@given(SIZES)
def test_no_stage_keeps_more_micro_batches_than_the_first_one(size: tuple[int, int]) -> None:
    stages, jobs = size
    schedules: tuple[Schedule, ...] = ("1F1B", "ZeroBubble")
    for schedule in schedules:
        for stage, passes in enumerate(order(schedule, jobs, stages)):
            last = passes[-1][0] if passes else "backward"
            kept = peak = 0
            for kind, _ in passes:
                kept += {"forward": 1, last: -1}.get(kind, 0)
                peak = max(peak, kept)
            assert peak <= (stages - stage if schedule == "1F1B" else stages)
