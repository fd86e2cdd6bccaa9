"""Cuts into stages: exact, within memory, and timed as the schedule runs them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_train.planner.assignment import assign
from elastic_train.planner.quotas import quotas
from elastic_train.planner.stages import Slowest, cut

pytestmark = pytest.mark.ring0

TIMES = st.lists(st.integers(0, 9), min_size=1, max_size=7)


@settings(deadline=None, derandomize=True, max_examples=150)
@given(TIMES, st.data())
def test_the_slowest_stage_is_as_fast_as_any_cut_allows(times: list[int], data: st.DataObject):
    seconds, n = np.array(times, float), len(times)
    stages = data.draw(st.integers(1, n))
    weights = np.array(data.draw(st.lists(st.integers(1, 5), min_size=n, max_size=n)))
    room = data.draw(st.integers(1, 40))

    def fits(start: int, stop: int, distance: int) -> bool:
        return weights[start:stop].sum() * (distance + 1) <= room

    def allowed(distance: int):
        return np.array([[b > a and fits(a, b, distance) for b in range(n + 1)] for a in range(n + 1)])

    def spans(inner: tuple[int, ...]):
        return list(itertools.pairwise((0, *inner, n)))

    possible = [
        max(seconds[a:b].sum() for a, b in spans(inner))
        for inner in itertools.combinations(range(1, n), stages - 1)
        if all(fits(a, b, stages - 1 - i) for i, (a, b) in enumerate(spans(inner)))
    ]
    best = Slowest(seconds, allowed).of(stages)
    assert best == min(possible, default=np.inf)
    if possible:
        positions = cut(seconds, stages, best, allowed)
        parts = list(itertools.pairwise(positions))
        assert (positions[0], positions[-1], len(parts)) == (0, n, stages)
        assert max(seconds[a:b].sum() for a, b in parts) == best
        assert all(fits(a, b, stages - 1 - i) for i, (a, b) in enumerate(parts))


def test_what_the_slowest_stage_leaves_free_is_spread_and_the_first_stages_are_light():
    assert cut(np.ones(10), 4, Slowest(np.ones(10)).of(4)) == (0, 2, 4, 7, 10)


def test_a_heavy_head_is_a_stage_of_its_own():
    seconds = np.array([0.0, *[1.0] * 48, 2.4])
    assert Slowest(seconds).of(17) == 3.0
    assert cut(seconds, 17, 3.0)[-2] == 49


@settings(deadline=None, derandomize=True, max_examples=150)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 2), st.integers(0, 6))
def test_quotas_end_as_early_as_any_division_of_the_micro_batches(speeds: list[int], least: int, more: int):
    count = len(speeds) * least + more
    found = quotas(count, [float(s) for s in speeds], least)
    every = (
        counts
        for counts in itertools.product(range(least, count + 1), repeat=len(speeds))
        if sum(counts) == count
    )
    end = min(max(n / s for n, s in zip(counts, speeds, strict=True)) for counts in every)
    assert sum(found) == count
    assert min(found) >= least
    assert max(n / s for n, s in zip(found, speeds, strict=True)) == end


def test_equal_workers_get_equal_quotas_the_first_ones_more():
    assert quotas(11, [1.0] * 4) == (3, 3, 3, 2)


@settings(deadline=None, derandomize=True, max_examples=150)
@given(st.integers(1, 5), st.integers(0, 1), st.data())
def test_an_assignment_costs_as_little_as_any(rows: int, more: int, data: st.DataObject):
    size = rows * (rows + more)
    values = data.draw(st.lists(st.integers(-4, 4), min_size=size, max_size=size))
    cost = np.array(values, float).reshape(rows, rows + more)
    columns = assign(cost)
    every = itertools.permutations(range(rows + more), rows)
    assert len(set(columns.tolist())) == rows
    assert cost[range(rows), columns].sum() == min(cost[range(rows), list(p)].sum() for p in every)
