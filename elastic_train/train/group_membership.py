"""The process group a member is in: how others abort it, and how far the member has come.

`progress`, `abort` and `check` may be called from any thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from elastic_train.planner.plan import Plan
from elastic_train.train.collectives.process_group import Group
from elastic_train.train.rank_assignment import WorkerProgress
from elastic_train.train.user_code_guard import UserCodeGuard

Faults = Callable[[str, int, int], None]
"""Called at (phase, step, micro-batch)."""


class GroupMembership:
    """At most one group at a time; one that was aborted is broken from its first moment."""

    def __init__(self, faults: Faults | None) -> None:
        self._faults = faults
        self._group: Group | None = None
        self._guard: UserCodeGuard | None = None
        self._aborted: set[int] = set()
        self._lock = threading.Lock()  # guards _group and _aborted between threads
        self.mark(0, -1, "idle", 0, -1, fault=False)

    @property
    def group(self) -> Group:
        assert self._group is not None, "a group comes first"
        return self._group

    @property
    def guard(self) -> UserCodeGuard:
        """Of the group that was entered last."""
        assert self._guard is not None, "a group comes first"
        return self._guard

    def progress(self) -> WorkerProgress:
        return self._progress

    def abort(self, generation: int) -> None:
        """Break a generation's collectives, running or to come. Idempotent; others are untouched."""
        with self._lock:
            self._aborted.add(generation)
            group = self._group
        if group is not None and group.generation == generation:
            group.break_()

    def check(self) -> None:
        """Raise GroupBroken if what this member is in was broken."""
        if self._group is not None:
            self._group.check()

    def enter(self, group: Group, plan: Plan, rank: int, step: int, *, ahead: bool = False) -> None:
        """Others may break it from now on, and some may have: GroupBroken. `step` will be its first one.

        `ahead`: another group trains meanwhile, and this one may never come about. The member is in none yet.
        """
        with self._lock:
            self._group = group
            aborted = group.generation in self._aborted
        if ahead:
            self.mark(0, -1, "preparing", step, -1, fault=False)
        else:
            self.mark(group.generation, rank, "forming", step, -1)
        if aborted:
            group.break_()
        group.check()
        self._guard = UserCodeGuard(
            worker=plan.workers[rank],
            node=plan.nodes[rank],
            rank=rank,
            generation=group.generation,
            broken=lambda: group.broken,
            silent=lambda: group.silent,
        )

    def break_off(self) -> None:
        """Break the group that this member is in, whatever its generation: it never came about."""
        with self._lock:
            group = self._group
        if group is not None:
            group.break_()

    def leave(self) -> None:
        with self._lock:
            group, self._group = self._group, None
        if group is not None:
            group.destroy()

    def mark(
        self, generation: int, rank: int, phase: str, step: int, micro_batch: int, *, fault: bool = True
    ) -> None:
        """This is where the member is now. With `fault` it is a place at which a test may strike."""
        self._progress = WorkerProgress(
            generation=generation,
            rank=rank,
            step=step,
            phase=phase,
            micro_batch=micro_batch,
            since=time.monotonic(),
        )
        if fault and self._faults is not None:
            self._faults(phase, step, micro_batch)
