"""Faults that a worker performs on itself at a scheduled phase of a step.

A mark in the run's storage makes each fault happen once, whichever process reaches its moment first and
however often the step is run.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Mapping

from elastic_train.cluster.faults.memory_exhaustion import exhaust
from elastic_train.cluster.faults.own_node import kill_own_node, wake_later
from elastic_train.control.fault_schedule import (
    PREPARING,
    BreakRank,
    ExhaustMemory,
    Fault,
    FaultSchedule,
    KillNode,
    KillRank,
    SlowNode,
    StopRank,
)
from elastic_train.errors import AlreadyExists
from elastic_train.storage.store import Store

MARKS = "chaos"


class FaultInjector:
    """A Member's `faults` hook. `labels` maps node ids to the labels that the schedule uses."""

    def __init__(
        self,
        schedule: FaultSchedule,
        *,
        store: Store,
        node: str,
        labels: Mapping[str, str],
        rank: Callable[[], int],
        break_group: Callable[[], None],
    ) -> None:
        label = labels.get(node, node)
        self._faults = dict(enumerate(schedule.faults))
        self._slow = [f for f in schedule.faults if isinstance(f, SlowNode) and f.node == label]
        self._store, self._rank, self._break_group = store, rank, break_group
        self._label = label
        self._step = 0  # of the last call
        self._calls: Counter[str] = Counter()  # in it, by phase: the rank's own

    def __call__(self, phase: str, step: int, micro_batch: int) -> None:
        if step != self._step or phase == "forming":
            self._step = step
            self._calls.clear()
        for fault in self._slow:
            if phase in ("forward", "backward") and fault.when.step <= step:
                threading.Event().wait(fault.seconds)
        count = self._calls[phase]
        self._calls[phase] += 1
        for number, fault in list(self._faults.items()):
            when = fault.when
            exact = phase not in ("forward", "backward", "update") or when.micro_batch == count
            if when.phase == phase and when.meets(step) and exact and self._mine(fault):
                del self._faults[number]
                if claim(self._store, number):
                    self._do(fault)

    def preparing(self, rank: int, step: int, point: str) -> None:
        """Called where this process is made ready for a rank of the next group, on any thread."""
        for number, fault in list(self._faults.items()):
            when = fault.when
            there = when.phase == "preparing" and PREPARING[when.micro_batch] == point
            if there and when.meets(step) and self._mine(fault, rank) and claim(self._store, number):
                self._do(fault)

    def _mine(self, fault: Fault, here: int | None = None) -> bool:
        match fault:
            case KillRank(rank=rank) | StopRank(rank=rank) | BreakRank(rank=rank) | ExhaustMemory(rank=rank):
                return rank == (self._rank() if here is None else here)
            case KillNode(node=node):
                return node == self._label
            case _:
                return False

    def _do(self, fault: Fault) -> None:
        match fault:
            case KillRank():
                os.kill(os.getpid(), signal.SIGKILL)
            case BreakRank():
                self._break_group()
            case ExhaustMemory():
                exhaust()
            case StopRank(seconds=seconds):
                if seconds is not None:
                    wake_later(os.getpid(), seconds)
                os.kill(os.getpid(), signal.SIGSTOP)
            case KillNode():
                kill_own_node()
            case _:
                raise AssertionError(fault)


def claim(store: Store, number: int) -> bool:
    """Whether this caller is the one that does the fault of this number."""
    try:
        store.create(f"{MARKS}/{number:04d}", b"")
    except AlreadyExists:
        return False
    return True
