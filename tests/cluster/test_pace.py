"""Whose time is whose: a rank's own, per micro-batch, without what it waits for others."""

from __future__ import annotations

import threading

import pytest

from elastic_train.cluster.pace import Stopwatch

pytestmark = pytest.mark.ring0
PASS_S = 0.02


def step(watch: Stopwatch, number: int, passes: int) -> None:
    for micro_batch in range(passes):
        watch("forward", number, micro_batch)
        watch("backward", number, micro_batch)
        threading.Event().wait(PASS_S)
    watch("reduce", number, -1)


def test_a_rank_with_more_micro_batches_is_no_slower() -> None:
    watch = Stopwatch()
    step(watch, 1, 1)
    few = watch.last
    step(watch, 2, 3)
    many = watch.last
    assert (few[0], many[0]) == (1, 2)
    assert few[1] == pytest.approx(many[1], rel=0.5)


def test_waits_in_collectives_are_not_its_own() -> None:
    waited = 0.0
    watch = Stopwatch(lambda: waited)
    watch("forward", 1, 0)
    threading.Event().wait(3 * PASS_S)
    waited = 3 * PASS_S
    watch("reduce", 1, -1)
    assert watch.last[1] < 2 * PASS_S
