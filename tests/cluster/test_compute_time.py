"""Whose time is whose: a rank's own, per micro-batch, without what it waits for others."""

from __future__ import annotations

import pytest

from elastic_train.cluster.worker.compute_time import Stopwatch

pytestmark = pytest.mark.ring0


class Time:
    """Passes where somebody computes or waits."""

    now = waited = 0.0

    def compute(self, seconds: float) -> None:
        self.now += seconds

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.waited += seconds


def watch_of(time: Time) -> Stopwatch:
    return Stopwatch(lambda: time.waited, clock=lambda: time.now)


def test_a_rank_with_more_micro_batches_is_no_slower() -> None:
    time = Time()
    watch = watch_of(time)
    for number, passes in ((1, 1), (2, 3)):
        for micro_batch in range(passes):
            watch("forward", number, micro_batch)
            watch("backward", number, micro_batch)
            time.compute(0.25)
        watch("reduce", number, -1)
        assert watch.last == (number, 0.25)
        time.compute(9.0)  # between two steps is no pass


def test_waits_in_collectives_are_not_its_own() -> None:
    time = Time()
    watch = watch_of(time)
    watch("forward", 1, 0)
    time.compute(0.25)
    time.wait(4.0)
    watch("reduce", 1, -1)
    assert watch.last == (1, 0.25)
