"""Selective logging: the exact choice is the best of all partitions, the greedy one is close."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_train.recovery.evidence import Logged
from elastic_train.recovery.grouping import Boundaries, Logging, curve, exact, greedy
from elastic_train.recovery.logs import Sent, logged, replayable

pytestmark = pytest.mark.ring0


@st.composite
def pipelines(draw: st.DrawFn) -> Boundaries:
    machines = draw(st.integers(1, 7))
    return Boundaries(
        machine_s=tuple(draw(st.lists(st.integers(1, 20), min_size=machines, max_size=machines))),
        edge_bytes=tuple(draw(st.lists(st.integers(1, 50), min_size=machines - 1, max_size=machines - 1))),
        interval=draw(st.sampled_from([1, 10])),
        bytes_s=draw(st.sampled_from([1.0, 1e3])),
    )


def every_grouping(boundaries: Boundaries) -> list[tuple[int, float]]:
    """Bytes and mean recovery seconds of every partition, the slow way."""
    machines = len(boundaries.machine_s)
    found = []
    for cuts in itertools.product((False, True), repeat=machines - 1):
        edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), machines]
        size = sum(b for b, cut in zip(boundaries.edge_bytes, cuts, strict=True) if cut) * boundaries.interval
        seconds = 0.0
        for machine in range(machines):
            start = max(e for e in edges if e <= machine)
            stop = min(e for e in edges if e > machine)
            inside = sum(boundaries.edge_bytes[start : stop - 1]) / boundaries.bytes_s
            replay = sum(boundaries.machine_s[start:stop]) + inside
            seconds += replay * boundaries.interval / 2 / machines
        found.append((size, seconds))
    return found


@settings(deadline=None, max_examples=60)
@given(boundaries=pipelines(), share=st.floats(0, 1))
def test_the_exact_groups_are_the_best_of_all_that_fit(boundaries: Boundaries, share: float) -> None:
    budget = int(share * sum(boundaries.edge_bytes) * boundaries.interval)
    best = min((s, b) for b, s in every_grouping(boundaries) if b <= budget)
    choice = exact(boundaries, budget)
    assert choice.recovery_s == pytest.approx(best[0])
    assert choice.log_bytes <= budget
    assert_tiles(choice, boundaries)


@settings(deadline=None, max_examples=60)
@given(boundaries=pipelines(), share=st.floats(0, 1))
def test_the_greedy_groups_fit_and_are_never_better_than_the_exact_ones(
    boundaries: Boundaries, share: float
) -> None:
    budget = int(share * sum(boundaries.edge_bytes) * boundaries.interval)
    choice = greedy(boundaries, budget)
    assert choice.log_bytes <= budget
    assert choice.recovery_s >= exact(boundaries, budget).recovery_s - 1e-9
    assert_tiles(choice, boundaries)


def assert_tiles(choice: Logging, boundaries: Boundaries) -> None:
    covered = [i for start, stop in choice.groups for i in range(start, stop)]
    assert covered == list(range(len(boundaries.machine_s)))


@settings(deadline=None, max_examples=30)
@given(boundaries=pipelines())
def test_more_log_never_means_a_longer_recovery(boundaries: Boundaries) -> None:
    points = curve(boundaries)
    assert points[-1].log_bytes == 0
    assert points[-1].groups == ((0, len(boundaries.machine_s)),)
    assert all(a.log_bytes > b.log_bytes for a, b in itertools.pairwise(points))
    assert all(a.recovery_s <= b.recovery_s for a, b in itertools.pairwise(points))


def test_a_long_even_pipeline_is_chosen_exactly_in_no_time() -> None:
    boundaries = Boundaries(machine_s=(1.0,) * 64, edge_bytes=(1 << 30,) * 63, interval=100, bytes_s=1e9)
    choice = exact(boundaries, budget=31 * 100 << 30)
    assert len(choice.groups) == 32
    assert {stop - start for start, stop in choice.groups} == {2}


def test_a_stage_can_be_replayed_where_all_its_neighbours_logs_meet() -> None:
    assert replayable(3, 1, [(2, 9), (4, 12)]) == Logged(generation=3, stage=1, first=4, last=9)
    assert replayable(3, 1, [(2, 3), (4, 12)]) is None
    assert replayable(3, 1, [(2, 9), None]) is None
    assert replayable(3, 1, []) is None


def test_what_workers_tell_gives_what_can_be_replayed_of_each_stage() -> None:
    """Three stages of which the middle one is lost; the last step's outcome is known elsewhere or nowhere."""
    told = {
        "a": (Sent(generation=2, stage=0, first=3, last=8, ahead=True),),
        "c": (Sent(generation=2, stage=2, first=4, last=9),),
    }
    known = logged(told, {2: 3}, {(2, 9)})
    assert known == (Logged(generation=2, stage=1, first=4, last=9, senders=("a", "c")),)
    (unknown,) = logged(told, {2: 3}, ())
    assert unknown.last == 8
    assert logged({"a": told["a"]}, {2: 3}, ()) == (), "a neighbour's log is gone with it"
    assert logged(told, {1: 3}, ()) == (), "of a plan that is forgotten nothing is known"


def test_a_stage_that_shares_a_parameter_needs_that_log_too() -> None:
    ties = ((0, 3),)
    sent = {f"w{s}": (Sent(generation=1, stage=s, first=1, last=5, ties=ties),) for s in (1, 2)}
    assert [log.stage for log in logged(sent, {1: 4}, ())] == []
    whole = sent | {"w3": (Sent(generation=1, stage=3, first=2, last=5, ties=ties),)}
    (log, *_) = logged(whole, {1: 4}, ())
    assert (log.stage, log.first, log.senders) == (0, 2, ("w1", "w3"))
