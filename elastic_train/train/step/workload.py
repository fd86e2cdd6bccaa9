"""Inputs of a stepper: the run's task and data, and one rank's process group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from elastic_train.config import RunSpec
from elastic_train.data.loader import Loader
from elastic_train.data.order import SampleOrder
from elastic_train.train.collectives.process_group import Group
from elastic_train.train.task import Task
from elastic_train.train.user_code_guard import UserCodeGuard

Mark = Callable[[str, int, int], None]
"""Called with (phase, step, micro-batch) where a step enters a phase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What a run trains, and on which samples. It is the same in every generation."""

    task: Task
    spec: RunSpec
    order: SampleOrder
    loader: Loader


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupContext:
    """One rank's part in a generation: its process group, the guard of user code, and its marks of progress.

    Where a lost stage is replayed, `group` are the ranks that replay it.
    """

    group: Group
    guard: UserCodeGuard
    mark: Mark
