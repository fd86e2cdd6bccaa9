"""Selective logging: the choice is the best of all partitions."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_train.recovery.boundary_groups import Boundaries, Logging, curve, exact

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
