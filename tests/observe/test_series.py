from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest

from elastic_train.observe.bounded_series import CAPACITY, Series
from elastic_train.observe.duration_quantiles import ERROR, Durations

pytestmark = pytest.mark.ring0


@pytest.mark.parametrize("count", [1, 7, CAPACITY, CAPACITY + 1, 5 * CAPACITY + 3])
def test_a_series_stays_small_and_keeps_extremes_sum_and_ends(count):
    draw = random.Random(count)
    values = [draw.gauss(0.0, 1.0) for _ in range(count)]
    series = Series()
    for step, value in enumerate(values, 1):
        series.add(float(step), step, value)
    buckets = series.buckets
    assert len(buckets) <= CAPACITY
    assert sum(b[4] for b in buckets) == count
    assert math.isclose(sum(b[5] for b in buckets), sum(values), abs_tol=1e-9)
    assert (min(b[6] for b in buckets), max(b[7] for b in buckets)) == (min(values), max(values))
    assert (buckets[0][2], buckets[-1][3]) == (1, count)
    assert all(a[3] < b[2] for a, b in pairwise(buckets))
    if count <= CAPACITY:
        assert [b[5] for b in buckets] == values


def test_values_that_are_not_finite_are_counted_and_left_out():
    series = Series()
    for value in (1.0, math.nan, math.inf, 2.0):
        series.add(0.0, 1, value)
    assert (len(series.buckets), series.left_out, series.last) == (2, 2, 2.0)


def test_steps_that_are_run_again_begin_a_bucket_of_their_own():
    series = Series(width=8)
    for number, step in enumerate([1, 2, 3, 2, 3, 4]):
        series.add(float(number), step, float(step))
    assert [(b[2], b[3]) for b in series.buckets] == [(1, 3), (2, 4)]


def test_quantiles_are_right_within_their_error_and_take_few_counts():
    draw = random.Random(0)
    values = sorted(draw.lognormvariate(0.0, 2.0) for _ in range(5000))
    durations = Durations()
    for value in values:
        durations.add(value)
    durations.add(math.nan)
    durations.add(-1.0)
    assert durations.count == len(values)
    assert len(durations.counts) < 500
    for share in (0.0, 0.5, 0.9, 0.99, 1.0):
        exact = values[int(share * (len(values) - 1))]
        assert durations.quantile(share) == pytest.approx(exact, rel=1.01 * ERROR)
    assert Durations().quantile(0.5) is None
