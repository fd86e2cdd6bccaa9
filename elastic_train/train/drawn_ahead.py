"""The model of the group that comes next, built without memory while nothing runs in this process.

Between the end of a group and the order to join the next one a process waits for others, and one that stands
by does nothing else. What is built then is what joining would build, under whatever plan; most of the time
that a rank needs to build its shards goes into it.
"""

from __future__ import annotations

from elastic_train.config import RunSpec
from elastic_train.train.declaration.loop_task import LoopTask
from elastic_train.train.model.build import Blueprint, draw
from elastic_train.train.task import Task
from elastic_train.train.user_code_guard import UserCodeGuard


class DrawnAhead:
    """At most one model, for whoever takes it first. Belongs to the training thread.

    A loop declares its models beside what it goes on with, and a model whose code needs values takes memory
    that others may use until it is wanted: of these none is built.
    """

    def __init__(self, task: Task, spec: RunSpec) -> None:
        self._task, self._spec = task, spec
        self._guard = UserCodeGuard(worker="", node="", rank=-1, generation=0, broken=lambda: False)
        self._possible = not isinstance(task, LoopTask)
        self._drawn: Blueprint | None = None

    def draw(self) -> None:
        """Build it, unless it is there. Where that fails it is not tried again: who joins builds the model,
        and what is wrong with it is said there, with its place.
        """
        if not self._possible or self._drawn is not None:
            return
        try:
            with self._guard.at("building the model", 0):
                self._drawn = draw(self._task, self._spec.precision, self._spec.batch.seed, values=False)
        except Exception:  # noqa: BLE001 - see above
            self._possible = False

    def take(self) -> Blueprint | None:
        drawn, self._drawn = self._drawn, None
        return drawn
