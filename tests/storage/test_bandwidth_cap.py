"""What is written under a cap takes as long as the cap says, however many write."""

from __future__ import annotations

import pytest

from elastic_train.checkpoint.piece import Piece
from elastic_train.checkpoint.writer import write_part
from elastic_train.geometry.box import Box
from elastic_train.storage.bandwidth_cap import BandwidthCap
from elastic_train.storage.memory_store import MemoryStore

pytestmark = pytest.mark.ring1


class Clock:
    """Time passes where somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_part_is_written_at_the_pace_of_the_cap() -> None:
    clock = Clock()
    pace = BandwidthCap(1e6, clock=clock, sleep=clock.sleep)
    size = 5 * 10**6
    piece = Piece(
        tensor="w",
        state="param",
        dtype="uint8",
        shape=(size,),
        box=Box.whole((size,)),
        data=memoryview(bytes(size)),
    )
    write_part(MemoryStore(), "attempt", 0, [piece], spend=pace.spend)
    assert clock.now - 100.0 == pytest.approx(5.0, rel=0.01)


def test_time_in_which_nobody_wrote_is_not_caught_up_on() -> None:
    clock = Clock()
    pace = BandwidthCap(10.0, clock=clock, sleep=clock.sleep)
    pace.spend(10)
    clock.now += 1000.0
    before = clock.now
    pace.spend(20)
    assert clock.now - before == pytest.approx(2.0)


def test_writers_share_the_cap() -> None:
    clock, slept = Clock(), list[float]()
    pace = BandwidthCap(10.0, clock=clock, sleep=slept.append)
    for _ in range(3):
        pace.spend(10)
    assert slept == pytest.approx([1.0, 2.0, 3.0])
