"""Worker reports: heartbeats, committed steps, and the final report of each generation."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable

from elastic_train.checkpoint.engine.machine_memory import memory_now
from elastic_train.cluster.error_causes import cause_of
from elastic_train.cluster.messages import Heartbeat, Writing
from elastic_train.cluster.reported_events import committed
from elastic_train.cluster.worker.compute_time import Stopwatch
from elastic_train.control.events import Cause, FinalReport, GroupBroken, StepCommitted
from elastic_train.train.member import Member
from elastic_train.train.step.training_loop import StepReport
from elastic_train.train.user_code_guard import in_user_code

REPORTS, UNSAID = 1024, 64  # steps that a controller may lose with its process, and those in its words


class WorkerReporter:
    """`post` takes its events. What belongs to the training thread comes last."""

    def __init__(self, *, worker: str, node: str, stopwatch: Stopwatch) -> None:
        self._worker, self._node, self._stopwatch = worker, node, stopwatch
        self._settled: set[int] = set()  # generations whose final report was given
        self._errors: dict[int, Cause] = {}
        self._reports: deque[StepCommitted] = deque(maxlen=REPORTS)
        self._lock = threading.Lock()
        self.member: Member | None = None  # there once it was built
        self.post: Callable[..., None] = lambda *_: None
        self.writing: Callable[[], Writing | None] = lambda: None

    def heartbeat(self) -> Heartbeat:
        progress = self.member.progress() if self.member is not None else None
        return Heartbeat(
            worker=self._worker,
            node=self._node,
            pid=os.getpid(),
            generation=progress.generation if progress else 0,
            rank=progress.rank if progress else -1,
            step=progress.step if progress else 0,
            phase=progress.phase if progress else "starting",
            micro_batch=progress.micro_batch if progress else 0,
            phase_s=time.monotonic() - progress.since if progress else 0.0,
            filled_bytes=progress.filled_bytes if progress else 0,
            needed_bytes=progress.needed_bytes if progress else 0,
            user_code=in_user_code(),
            paced_step=self._stopwatch.last[0],
            own_s=self._stopwatch.last[1],
            memory=memory_now(),
            writing=self.writing(),
        )

    def rank(self) -> int:
        """This worker's rank in the group that it is in, -1 without one."""
        return self.member.progress().rank if self.member is not None else -1

    def failed(self, generation: int, error: BaseException) -> Cause:
        """The cause of a generation's end: the first error that was met in it."""
        progress = self.member.progress() if self.member is not None else None
        return self._errors.setdefault(generation, cause_of(error, node=self._node, at=progress))

    def lost(self, generation: int, error: BaseException) -> None:
        """This process is about to end, and there is no final report."""
        cause = self.failed(generation, error)
        self.post(GroupBroken(at=0.0, generation=generation, worker=self._worker, cause=cause))

    def settled(self, generation: int) -> bool:
        return generation in self._settled

    def repeat(self) -> tuple[StepCommitted, ...]:
        """The last steps, for a controller that may have died before they were durable."""
        with self._lock:
            return tuple(self._reports)

    # -- the training thread

    def step(self, report: StepReport) -> None:
        event = committed(report)
        with self._lock:
            self._reports.append(event)
            first = len(self._reports) < 2 or self._reports[-2].generation != event.generation
        if report.rank == 0:
            self.post(event, can_wait=not first)

    def broke(self, generation: int, error: BaseException) -> None:
        cause = self.failed(generation, error)
        broken = GroupBroken(at=0.0, generation=generation, worker=self._worker, cause=cause)
        self._say(generation, broken)

    def final_report(self, generation: int, *, again: bool = False) -> None:
        """Report local states and the error that was met. `again`: the first report may be lost."""
        if again or generation not in self._settled:
            self._say(generation)

    def _say(self, generation: int, *first: GroupBroken) -> None:
        assert self.member is not None
        self._settled.add(generation)
        # Of a rank 0 that died; known ones change nothing.
        unsaid = [report for report in self.repeat()[-UNSAID:] if report.generation == generation]
        self.post(
            *first,
            *unsaid,
            FinalReport(
                at=0.0,
                generation=generation,
                worker=self._worker,
                local_states=self.member.held.local_states(),
                error=self._errors.get(generation),
                logs=self.member.held.logs(),
            ),
        )
