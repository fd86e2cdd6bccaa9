"""A driver whose head is gone ends with a reason before Ray ends it; one that only waits goes on waiting."""

from __future__ import annotations

import socket

import pytest

from elastic_train.cluster.driver.head_watch import RAY_ENDS_S, HeadWatch
from elastic_train.errors import HeadLost

pytestmark = pytest.mark.ring1


class Bench:
    """A watch over a head that is there or not, while time passes."""

    def __init__(self, **options: float) -> None:
        self.now, self.there = 0.0, True
        self.watch = HeadWatch("10.0.0.1:6379", clock=lambda: self.now, accepts=self.accepts, **options)

    def accepts(self, host: str, port: int) -> bool:
        return self.there and (host, port) == ("10.0.0.1", 6379)

    def silent(self, seconds: float) -> float | None:
        """When the run is given up within so many seconds without an answer."""
        end = self.now + seconds
        while self.now < end:
            self.now += self.watch.answer_s
            try:
                self.watch.check()
            except HeadLost as lost:
                return lost.silent_s
        return None


def test_a_head_that_is_gone_is_told_before_ray_ends_the_driver() -> None:
    bench = Bench()
    bench.watch.heard()
    bench.there = False
    silent_s = bench.silent(300.0)
    assert silent_s is not None
    assert RAY_ENDS_S / 2 < silent_s < RAY_ENDS_S - 5.0


def test_a_controller_that_is_silent_while_its_head_is_there_is_waited_for() -> None:
    bench = Bench()
    assert bench.silent(1000.0) is None
    bench.there = False
    assert bench.silent(15.0) is None, "what was silent before is no sign against the head"
    bench.watch.heard()
    assert bench.silent(35.0) is None, "a head that is restarted has its time"


def test_the_time_that_ray_is_given_is_ours_too() -> None:
    bench = Bench(ray_ends_s=300.0)
    bench.there = False
    assert bench.silent(180.0) is None
    assert bench.silent(60.0) is not None


def test_a_port_that_nobody_listens_at_is_no_head() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address, now = f"127.0.0.1:{listening.getsockname()[1]}", [0.0]
        watch = HeadWatch(address, clock=lambda: now[0])
        now[0] = 1000.0
        watch.check()
    now[0] += 1000.0
    with pytest.raises(HeadLost):
        watch.check()
