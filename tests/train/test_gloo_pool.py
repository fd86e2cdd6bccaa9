"""The pool of test processes reports what becomes of its calls."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest

from elastic_train.testing.gloo_pool import GlooPool, PerRank, PoolError
from elastic_train.testing.gloo_worker import Died, Raised, Returned

pytestmark = pytest.mark.ring2

State = dict[str, Any]


def add(state: State, common: int, own: int) -> tuple[int, int]:
    state["total"] = state.get("total", 0) + common + own
    return state["index"], state["total"]


def fail(state: State, why: str) -> None:
    raise ValueError(why)


def wait_for_release(state: State) -> str:
    release = threading.Event()
    state["release"] = release
    release.wait(200)
    return "released"


def release(state: State) -> bool:
    found = state.pop("release", None)
    if found is not None:
        found.set()
    return found is not None


def end_itself(state: State) -> None:
    os._exit(7)


def test_arguments_are_shared_or_one_for_each_and_state_stays(pool: GlooPool) -> None:
    assert pool.run(add, 10, PerRank([1, 2]), ranks=[2, 0]) == [(2, 11), (0, 12)]
    assert pool.run(add, 1, 1, ranks=[0, 2]) == [(0, 14), (2, 13)]


def test_an_exception_comes_back_with_its_process_and_traceback(pool: GlooPool) -> None:
    with pytest.raises(PoolError, match=r"(?s)process 1 raised:.*in fail.*ValueError: too late"):
        pool.run(fail, "too late", ranks=[1])


def test_a_process_is_reached_while_it_is_busy_and_late_answers_go_to_nobody(pool: GlooPool) -> None:
    busy = pool.call_async(wait_for_release, ranks=[0])
    with pytest.raises(PoolError, match="process 0 did not answer in time"):
        busy.results(timeout=0.2)
    while not pool.control(0, release):
        pass
    assert pool.run(add, 1, 1, ranks=[0]) == [(0, 2)]


def test_outcomes_are_values(pool: GlooPool) -> None:
    outcomes = pool.call_async(fail, "x", ranks=[3]).outcomes()
    assert isinstance(outcomes[3], Raised)
    assert outcomes[3].error == "ValueError: x"
    assert pool.call_async(add, 0, 0, ranks=[3]).outcomes() == {3: Returned(value=(3, 0))}


def test_processes_that_end_or_are_killed_are_reported_and_can_be_replaced(pool: GlooPool) -> None:
    ended = pool.call_async(end_itself, ranks=[1])
    waiting = pool.call_async(wait_for_release, ranks=[2])
    pool.kill(2)
    assert ended.outcomes() == {1: Died(exitcode=7)}
    assert waiting.outcomes() == {2: Died(exitcode=-9)}
    assert [pool.alive(rank) for rank in range(4)] == [True, False, False, True]
    pool.restart(2)
    assert pool.run(add, 1, 0, ranks=[2, 3]) == [(2, 1), (3, 1)]
