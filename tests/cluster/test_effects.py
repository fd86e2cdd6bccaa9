"""An effect ends exactly once, whatever it does; what is urgent never waits behind what is slow."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from elastic_train.cluster.controller.effects import (
    WIDTH,
    Done,
    Effect,
    Effects,
    Ending,
    Failed,
    Lane,
    Late,
    Refused,
)
from elastic_train.cluster.controller.end_run import finish
from elastic_train.errors import StorageError, UserCodeError

pytestmark = pytest.mark.ring1
LONG_S = 600.0
WAIT_S = 60.0


class Bench:
    """Effects, what they ended as, and gates that hold their calls."""

    def __init__(self) -> None:
        self.faults: queue.Queue[tuple[str, Exception]] = queue.Queue()
        self.endings: queue.Queue[tuple[str, Ending[Any]]] = queue.Queue()
        self.gates: list[threading.Event] = []
        self.effects = Effects(fault=lambda name, error: self.faults.put((name, error)))

    def gate(self) -> threading.Event:
        self.gates.append(threading.Event())
        return self.gates[-1]

    def begin(
        self,
        name: str,
        call: Callable[[], Any],
        *,
        lane: Lane = Lane.URGENT,
        within_s: float = LONG_S,
        lasting: bool = False,
    ) -> None:
        effect = Effect(
            name=name,
            lane=lane,
            within_s=within_s,
            call=call,
            ended=lambda ending: self.endings.put((name, ending)),
            lasting=lasting,
        )
        self.effects.begin(effect)

    def next(self) -> tuple[str, Ending[Any]]:
        return self.endings.get(timeout=WAIT_S)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    for gate in made.gates:
        gate.set()
    made.effects.close(*Lane)


def fails(error: BaseException) -> Callable[[], None]:
    def call() -> None:
        raise error

    return call


@pytest.mark.parametrize(
    ("error", "account"),
    [
        (StorageError(path="p", operation="write", problem="503"), "storage"),
        (
            UserCodeError(worker="w", rank=0, node="n", step=1, phase="loss", error="E", traceback=""),
            "job",
        ),
        (ConnectionResetError("connection reset by peer"), "ours"),
        (AttributeError("a fault of ours"), "ours"),
        (SystemExit(3), "ours"),
    ],
)
def test_whatever_a_call_raises_is_an_ending_with_an_account(
    bench: Bench, error: BaseException, account: str
) -> None:
    bench.begin("it", fails(error))
    assert bench.next() == ("it", Failed(account=account, error=error))


def test_what_a_call_returns_is_told(bench: Bench) -> None:
    bench.begin("it", lambda: 7)
    assert bench.next() == ("it", Done(value=7))
    assert bench.effects.outstanding() == ()


@pytest.mark.parametrize("slow", [Lane.STARTING, Lane.STORAGE, Lane.JOURNAL, Lane.FORMING])
def test_what_is_urgent_passes_any_number_of_hung_effects(bench: Bench, slow: Lane) -> None:
    gate = bench.gate()
    for number in range(200):
        bench.begin(f"slow {number}", gate.wait, lane=slow)
    bench.begin("abort", lambda: None, lane=Lane.URGENT)
    assert bench.next() == ("abort", Done(value=None))
    waits = Counter(one.begun for one in bench.effects.outstanding())
    assert waits == {True: WIDTH[slow], False: 200 - WIDTH[slow]}
    gate.set()
    assert {bench.next()[0] for _ in range(200)} == {f"slow {number}" for number in range(200)}


def test_a_call_that_hangs_is_late_and_loses_its_place(bench: Bench) -> None:
    gate = bench.gate()
    for number in range(WIDTH[Lane.FORMING]):
        bench.begin(f"hung {number}", gate.wait, lane=Lane.FORMING, within_s=0.05)
    bench.begin("next", lambda: None, lane=Lane.FORMING)
    ended = dict(bench.next() for _ in range(WIDTH[Lane.FORMING] + 1))
    assert ended.pop("next") == Done(value=None)
    assert set(ended.values()) == {Late(within_s=0.05, begun=True)}
    gate.set()
    bench.begin("last", lambda: None, lane=Lane.FORMING)
    assert bench.next() == ("last", Done(value=None)), "what was late is not told again"


def test_a_lane_that_keeps_order_never_runs_two_and_all_of_them_end(bench: Bench) -> None:
    gate, ran = bench.gate(), list[str]()
    bench.begin("commit", lambda: (gate.wait(), ran.append("commit")), lane=Lane.STORAGE, within_s=0.05)
    bench.begin("prune", lambda: ran.append("prune"), lane=Lane.STORAGE)
    bench.begin("dropped", lambda: ran.append("dropped"), lane=Lane.STORAGE, within_s=0.05)
    assert {bench.next()[0] for _ in range(2)} == {"commit", "dropped"}
    assert ran == [], "a deletion does not meet a commit that may still come true"
    gate.set()
    assert bench.next() == ("prune", Done(value=None))
    assert ran == ["commit", "prune"]


def test_what_lasts_is_told_when_it_comes_true_after_its_deadline(bench: Bench) -> None:
    gate = bench.gate()
    bench.begin("commit", lambda: gate.wait() and "slot 3", lane=Lane.STORAGE, within_s=0.05, lasting=True)
    assert bench.next() == ("commit", Late(within_s=0.05, begun=True))
    gate.set()
    assert bench.next() == ("commit", Done(value="slot 3"))


def test_work_of_another_process_ends_without_a_thread_of_its_own(bench: Bench) -> None:
    futures = [Future[int]() for _ in range(500)]
    before = threading.active_count()
    for number, future in enumerate(futures):
        bench.effects.follow(
            str(number), future, LONG_S, lambda ending, n=number: bench.endings.put((str(n), ending))
        )
    assert threading.active_count() == before
    futures[3].set_exception(ValueError("it died"))
    name, ending = bench.next()
    assert name == "3"
    assert isinstance(ending, Failed)
    late: queue.Queue[Ending[int]] = queue.Queue()
    bench.effects.follow("hung", Future[int](), 0.05, late.put)
    assert late.get(timeout=WAIT_S) == Late(within_s=0.05, begun=True)


def test_the_end_waits_for_what_storage_is_still_doing_and_not_for_ever(bench: Bench) -> None:
    deletes, waits, ended = bench.gate(), threading.Event(), threading.Event()

    def end() -> None:
        finish(bench.effects, hook=waits.set)
        ended.set()

    for hangs in (False, True):
        bench.begin("deletes", deletes.wait, lane=Lane.STORAGE)
        threading.Thread(target=end, daemon=True).start()
        assert waits.wait(WAIT_S)
        assert not ended.is_set()
        if not hangs:
            deletes.set()
        assert ended.wait(WAIT_S)
        for event in (deletes, waits, ended):
            event.clear()


def test_a_closed_lane_refuses_what_waits_and_what_comes(bench: Bench) -> None:
    gate = bench.gate()
    for number in range(WIDTH[Lane.STARTING] + 3):
        bench.begin(f"start {number}", gate.wait, lane=Lane.STARTING)
    bench.effects.close(Lane.STARTING)
    bench.begin("too late", lambda: None, lane=Lane.STARTING)
    refused = [bench.next() for _ in range(4)]
    assert all(isinstance(ending, Refused) for _, ending in refused)
    assert refused[-1][0] == "too late"


def test_a_loop_survives_whatever_its_calls_raise(bench: Bench) -> None:
    turns: queue.Queue[int] = queue.Queue()
    count = iter(range(10**9))

    def call() -> None:
        number = next(count)
        turns.put(number)
        if number < 3:
            raise (OSError("no route"), KeyError("a fault of ours"), AssertionError())[number]

    bench.effects.every("lease", 0.0, call)
    assert [turns.get(timeout=WAIT_S) for _ in range(6)] == list(range(6))


def test_what_goes_wrong_where_an_ending_is_told_is_a_fault_of_ours(bench: Bench) -> None:
    broken = Effect(
        name="it", lane=Lane.URGENT, within_s=LONG_S, call=lambda: 1, ended=lambda _: fails(KeyError("x"))()
    )
    bench.effects.begin(broken)
    name, error = bench.faults.get(timeout=WAIT_S)
    assert name == "it"
    assert isinstance(error, KeyError)
