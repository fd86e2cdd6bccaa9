"""Training on the rehearsal device: of what the CPU is held to what takes seconds, and what a device adds.

`test_training_whole` runs everything.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from elastic_train.errors import GroupBroken
from elastic_train.planner.plan import Mesh
from elastic_train.testing.gang import From, Gang
from elastic_train.testing.gang_member import call
from elastic_train.testing.gloo_pool import GlooPool, PerRank
from elastic_train.testing.rehearsal.build import load_library
from elastic_train.testing.rehearsal.device import GIB
from tests.tasks.chain import ChainTask
from tests.tasks.tiny import TinyTask, tiny_run
from tests.train.equality import spec
from tests.train.test_moves import (
    test_a_move_to_the_same_plan_changes_no_bit,
    test_ranks_that_are_filled_while_the_others_run_the_first_step_end_as_if_nothing_had_moved,
)
from tests.train.test_replay import test_adjacent_stages_that_log_nothing_between_them_replay_as_one

pytestmark = [pytest.mark.ring2, pytest.mark.usefixtures("late_queues")]
__all__ = [
    "test_a_move_to_the_same_plan_changes_no_bit",
    "test_adjacent_stages_that_log_nothing_between_them_replay_as_one",
    "test_ranks_that_are_filled_while_the_others_run_the_first_step_end_as_if_nothing_had_moved",
]


def where_it_is(state: dict[str, Any]) -> set[str]:
    shards = state["member"].held.current
    tensors = list(shards.parameters.values())
    tensors += [v for own in shards.optimizer.state.values() for n, v in own.items() if n != "step"]
    return {tensor.device.type for tensor in tensors if isinstance(tensor, torch.Tensor)}


def test_members_train_where_they_are_told_to(pool: GlooPool) -> None:
    gang = Gang(pool, TinyTask(), tiny_run(max_steps=2))
    gang.form(gang.plan(1, 2))
    gang.run()
    assert pool.run(where_it_is, ranks=gang.processes) == [{"rehearsal"}] * 2


def note_backward_threads(state: dict[str, Any]) -> None:
    for parameter in state["member"].held.current.parameters.values():
        if parameter.requires_grad:
            parameter.register_hook(lambda _: state.setdefault("threads", set()).add(threading.get_ident()))


def only_its_own(state: dict[str, Any]) -> bool:
    return state["threads"] == {threading.main_thread().ident}


def test_backwards_run_on_the_training_thread_whose_layouts_no_generation_leaves_behind(
    pool: GlooPool,
) -> None:
    """torch keeps layouts by thread, and they name groups: of a device's own thread nobody clears them."""
    gang = Gang(pool, ChainTask(), spec(max_steps=6))
    gang.form(gang.plan_on(Mesh(tp=2)))
    for step, processes in ((2, [1, 0]), (4, [0, 1])):
        pool.run(note_backward_threads, ranks=gang.processes)
        gang.pause_at(step)
        gang.form(gang.plan_on(Mesh(tp=2)), processes, gang.held())
    assert [report.step for report in gang.run()] == [5, 6]
    assert all(pool.run(only_its_own, ranks=gang.processes))


@pytest.mark.parametrize(("phase", "gradient"), [("vote", True), ("backward", False)])
def test_what_an_abort_leaves_is_taken_for_no_outcome(pool: GlooPool, phase: str, gradient: bool) -> None:
    """On a device the operation ends without an error, and what it was to write is what was there before."""
    gang = Gang(pool, TinyTask(), tiny_run())
    gang.form(gang.plan_on(Mesh(dp_replicate=2)))
    running = gang.begin_until(1, phase, 3)
    gang.abort()
    for end, error, _ in running.results():
        assert end is None
        assert error.startswith("GroupBroken")
    (held,) = pool.run(call, "held.local_states", ranks=[0])[0]
    assert held.step == 2
    assert (held.reached == 3) == gradient
    gang.form(gang.plan(1, 1), [0], From(generation=gang.generation, step=2, holders=(0,)))
    assert [report.step for report in gang.run()] == [3, 4, 5]
    assert all(np.isfinite(value.astype(float)).all() for value in gang.whole().values())


def leave(state: dict[str, Any], more: int | None) -> None:
    """Limit the device's memory to what is allocated and so many bytes more; None: lift the limit."""
    there = 8 * GIB if more is None else torch.accelerator.memory_allocated() + more
    load_library().set_limit(torch.accelerator.current_device_index(), there)


def test_memory_that_a_step_does_not_find_is_told_with_its_peak(pool: GlooPool) -> None:
    gang = Gang(pool, TinyTask(), tiny_run())
    gang.form(gang.plan(1, 1))
    pool.run(leave, 2048, ranks=[0])
    (outcome,) = gang.begin().results()
    pool.run(leave, None, ranks=[0])
    assert outcome[0] is None
    assert outcome[1].startswith("DeviceMemoryExceeded: rehearsal out of memory. Tried to allocate")
    assert "Tensors took" in outcome[1]
    assert "Tensors took 0 " not in outcome[1]


def fail_in(state: dict[str, Any], phase: str, step: int) -> None:
    """From a phase of a step on the device gives nothing but an error."""

    def fault(now: str, at: int, _: int) -> None:
        if (now, at) == (phase, step):
            load_library().fail(torch.accelerator.current_device_index())

    state["faults"] = fault


def test_a_device_that_fails_is_told_apart_from_the_jobs_own_code(pool: GlooPool) -> None:
    gang = Gang(pool, TinyTask(), tiny_run())
    gang.form(gang.plan(2, 1))
    pool.run(fail_in, "forward", 3, ranks=[1])
    running = gang.begin()
    ((end, error, reports),) = running.results(ranks=[1])
    gang.abort([0])
    running.results(ranks=[0])
    pool.kill(1)
    assert end is None
    assert error.startswith("DeviceFailed: rehearsal failed, so its worker ends and others go on: ")
    assert [report.step for report in reports] == [1, 2]


def begin_slowly(state: dict[str, Any], seconds: float) -> None:
    load_library().set_beginning(seconds)


def forming(state: dict[str, Any], assignment: Any) -> float:
    began = time.monotonic()
    try:
        state["member"].join(assignment)
        state["member"].forming.initialise()
        state["member"].forming.digest()
    except GroupBroken:
        return time.monotonic() - began
    raise AssertionError("it formed")


def test_communicators_that_take_long_to_begin_are_waited_for_and_left_by_an_abort(pool: GlooPool) -> None:
    gang = Gang(pool, TinyTask(), tiny_run(max_steps=2))
    try:
        pool.run(begin_slowly, 0.1)
        began = time.monotonic()
        gang.form(gang.plan(2, 1))
        assert time.monotonic() - began > 0.2
        assert [report.step for report in gang.run()] == [1, 2]
        pool.run(begin_slowly, 60.0)
        assignments = gang.assignments(gang.plan(2, 1), [0, 1])
        waiting = pool.call_async(forming, PerRank(assignments), ranks=[0, 1])
        time.sleep(2.0)
        gang.abort()
        assert all(took < 10.0 for took in waiting.results())
    finally:
        pool.run(begin_slowly, 0.0)
