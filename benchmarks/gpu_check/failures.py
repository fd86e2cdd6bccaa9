"""What is claimed of what is lost on a device: a collective, a process, a stage, the device, its memory."""

from __future__ import annotations

import gc
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.gpu_check.bench import ALONE, OF_TWO, SPEC, STEPS, TASK, Bench, Unlike, plan_of
from benchmarks.problem import Problem
from elastic_train.control.causes import Cause
from elastic_train.control.exceeded_plans import with_exceeded
from elastic_train.models.llama import Llama
from elastic_train.models.sizes import size
from elastic_train.planner.memory_model import memory_per_worker
from elastic_train.planner.plan import Infeasible, WorkerSlot
from elastic_train.planner.question import Question
from elastic_train.planner.search import planner_for
from elastic_train.recovery.substitute_plan import substitute
from elastic_train.testing.gang import From, Gang
from elastic_train.testing.gang_member import start
from elastic_train.testing.gloo_pool import GlooPool
from elastic_train.testing.rehearsal import device as rehearsal
from elastic_train.testing.rehearsal.build import load_library
from elastic_train.testing.replayed_stage import held_now, kept_for, part_of, replay
from elastic_train.train.profile import profiled_shape
from elastic_train.train.rank_assignment import ReplayAssignment
from elastic_train.train.task import Task

FAILS_AT = 3
"""The step in which a device fails."""


def aborted(bench: Bench) -> dict[str, Any]:
    """A group is broken in the middle of a collective, and formed again in the same processes."""
    gang = bench.gang()
    gang.form(plan_of(gang, OF_TWO[0]))
    running = gang.begin_until(1, "vote", 3)
    time.sleep(0.5)  # the other one is in the vote's all-reduce by now
    began = time.monotonic()
    gang.abort()
    for _, error, _ in running.results():
        if not error.startswith("GroupBroken"):
            raise Unlike(f"an aborted group ended with {error!r}")
    took = time.monotonic() - began
    gang.form(plan_of(gang, OF_TWO[1]), None, From(generation=gang.generation, step=2, holders=(0, 1)))
    worst = bench.check_losses([r.loss for r in gang.run()], first=3)
    return {"abort_s": took, "largest_difference": worst}


def killed(bench: Bench) -> dict[str, Any]:
    """A process is killed while the other waits for it; that one goes on with its own state and a new one."""
    gang = bench.gang()
    gang.form(plan_of(gang, OF_TWO[0]))
    running = gang.begin_until(1, "reduce", 3)
    bench.pool.kill(1)
    began = time.monotonic()
    gang.abort([0])
    (_, error, _) = running.results(ranks=[0])[0]
    took = time.monotonic() - began
    if not error.startswith("GroupBroken"):
        raise Unlike(f"the one that was left ended with {error!r}")
    generation = gang.generation
    _replace(bench.pool, 1, TASK)
    gang.form(plan_of(gang, OF_TWO[1]), None, From(generation=generation, step=2, holders=(0,)))
    worst = bench.check_losses([r.loss for r in gang.run()], first=3)
    return {"abort_s": took, "largest_difference": worst}


def failed(bench: Bench) -> dict[str, Any]:
    """A device that gives nothing but errors ends its own process alone; the other goes on from its state."""
    gang = bench.gang()
    gang.form(plan_of(gang, OF_TWO[0]))
    bench.pool.run(_fail_later, ranks=[1])
    running = gang.begin()
    ((_, error, _),) = running.results(ranks=[1])
    gang.abort([0])
    ((_, other, _),) = running.results(ranks=[0])
    if not error.startswith("DeviceFailed") or not other.startswith("GroupBroken"):
        raise Unlike(f"they ended with {error!r} and {other!r}")
    generation = gang.generation
    bench.pool.kill(1)
    _replace(bench.pool, 1, TASK)
    gang.form(plan_of(gang, OF_TWO[1]), None, From(generation=generation, step=FAILS_AT - 1, holders=(0,)))
    worst = bench.check_losses([r.loss for r in gang.run()], first=FAILS_AT)
    return {"largest_difference": worst}


@dataclass(frozen=True, kw_only=True)
class Tied(Problem):
    """The embedding is on the first stage and on the last."""

    def model(self) -> nn.Module:
        return Llama(size(self.size, tied=True))


def replayed(bench: Bench) -> dict[str, Any]:
    """A stage whose process is killed comes back to the bit, from what it began with and the other's log."""
    task, stages = Tied(seq_len=TASK.seq_len, samples=TASK.samples), (1, 2)
    gang = Gang(bench.pool, task, replace(SPEC, precision="fp32"))
    plan = plan_of(gang, OF_TWO[4])
    gang.form(plan)
    base = bench.pool.run(part_of, ranks=[1])
    gang.run()
    (expected,) = bench.pool.run(held_now, ranks=[1])
    (kept,) = bench.pool.run(kept_for, stages, STEPS, ranks=[0])
    bench.pool.kill(1)
    gang.abort([0])
    _replace(bench.pool, 1, task, precision="fp32")
    found = substitute(plan, stages, ["1"], exact=True)
    assert found is not None
    assignment = ReplayAssignment(
        generation=gang.generation,
        during=next(bench.pool.generations),
        substitute=found,
        number=0,
        ranks=found.substituted_ranks(0),
        store_host=bench.pool.store_host,
        store_port=bench.pool.store_port,
        address="127.0.0.1",
    )
    began = time.monotonic()
    ((values, _),) = bench.pool.run(replay, assignment, base, kept, STEPS, ranks=[1])
    took = time.monotonic() - began
    if values.keys() != expected.keys() or not all(np.array_equal(values[n], expected[n]) for n in expected):
        raise Unlike("the stage that was replayed has other bits")
    return {"steps": STEPS, "replay_s": took, "logged_mb": sum(t.nbytes for t in kept[0].values()) / 1e6}


def memory(bench: Bench) -> dict[str, Any]:
    """Memory that is too small is told with the peak, as the device's own."""
    gang = bench.gang()
    gang.form(gang.plan_on(ALONE))
    try:
        bench.pool.run(_leave_little, ranks=[0])
        (_, error, _) = gang.begin().results()[0]
    finally:
        bench.pool.run(_leave_all, ranks=[0])
    peak = _peak_in(error)
    if peak <= 0:
        raise Unlike(error)
    return {"peak_mb": peak / 1e6}


def another_plan(bench: Bench) -> dict[str, Any]:
    """A plan that finds too little memory is left for one that needs less, which then trains with that."""
    small = bench.device == rehearsal.NAME
    task = Problem(size="small" if small else "base", seq_len=TASK.seq_len, samples=TASK.samples)
    spec = replace(SPEC, precision="fp32", max_steps=2)
    shape, gang = profiled_shape(task, spec, flops_per_s=1e12), Gang(bench.pool, task, spec)
    planner = planner_for(spec, shape=shape)
    question = Question(worker_slots=tuple(WorkerSlot(worker=f"w{i}", node=f"w{i}") for i in range(2)))
    first = planner(question)
    assert not isinstance(first, Infeasible)
    needed, less = (memory_per_worker(shape, mesh).training for mesh in (first.plan.mesh, OF_TWO[1]))
    bench.pool.run(_leave, (needed + less) // 2, ranks=[0])
    try:
        gang.form(first.plan)
        running = gang.begin()
        ((_, error, _),) = running.results(ranks=[0])
        gang.abort([1])
        running.results(ranks=[1])
        peak = _peak_in(error)
        exceeded = with_exceeded((), first.plan, [Cause(kind="memory", detail=error, peak=peak)])
        then = planner(replace(question, exceeded=tuple(plan for plan, _ in exceeded)))
        if isinstance(then, Infeasible):
            raise Unlike(f"no plan was found after {first.plan.mesh}: {then.reason}")
        gang = Gang(bench.pool, task, spec)
        gang.form(then.plan)
        losses = [r.loss for r in gang.run()]
    finally:
        bench.pool.run(_leave_all, ranks=[0])
    if not np.isfinite(losses).all():
        raise Unlike(f"losses {losses} under {then.plan.mesh}")
    return {"left": str(first.plan.mesh), "taken": str(then.plan.mesh), "peak_mb": peak / 1e6}


def _peak_in(error: str) -> int:
    """Bytes."""
    if not error.startswith("DeviceMemoryExceeded"):
        raise Unlike(f"it ended with {error!r}")
    return int(error.partition("Tensors took ")[2].partition(" ")[0].replace(",", ""))


def _replace(pool: GlooPool, process: int, task: Task, **changes: Any) -> None:
    """A new process in the place of one that is gone, with a member that holds nothing."""
    pool.restart(process)
    pool.run(start, task, replace(SPEC, **changes), ranks=[process])


# -- in the processes


def _fail_later(state: dict[str, Any]) -> None:
    """In the middle of a step the device fails for good: nobody hears of it before a host waits for it."""
    device = state["device"]

    def fault(phase: str, step: int, _: int) -> None:
        if (phase, step) != ("forward", FAILS_AT):
            return
        if device == rehearsal.NAME:
            load_library().fail(torch.accelerator.current_device_index())
        else:
            torch.zeros(3, device=device)[torch.tensor([1 << 20], device=device)]

    state["faults"] = fault


def _leave(state: dict[str, Any], more: int) -> None:
    """So many bytes beyond what is in use."""
    gc.collect()
    torch.accelerator.empty_cache()
    _, room = torch.accelerator.get_memory_info()
    there = torch.accelerator.memory_allocated() + more
    torch.get_device_module(state["device"]).set_per_process_memory_fraction(there / room)


def _leave_little(state: dict[str, Any]) -> None:
    """A step finds a quarter of a MB. What the allocator has reserved and nobody uses is filled, too."""
    torch.accelerator.empty_cache()
    _, room = torch.accelerator.get_memory_info()
    there = torch.accelerator.memory_reserved() + (2 << 20)
    torch.get_device_module(state["device"]).set_per_process_memory_fraction(there / room)
    filling = state["filling"] = []
    for piece in (1 << 20, 1 << 9):
        with suppress(torch.OutOfMemoryError):
            while True:
                filling.append(torch.empty(piece, dtype=torch.uint8, device=state["device"]))
    del filling[-512:]


def _leave_all(state: dict[str, Any]) -> None:
    state.pop("filling", None)
    torch.get_device_module(state["device"]).set_per_process_memory_fraction(1.0)
