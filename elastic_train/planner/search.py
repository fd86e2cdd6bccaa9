"""The planner of a run: full search where the model's layers are known, else data-parallel plans."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from elastic_train.config import Parallelism, RunSpec
from elastic_train.planner.choose_plan import choose
from elastic_train.planner.data_parallel import DataParallel
from elastic_train.planner.hardware import Hardware
from elastic_train.planner.memory_model import memory_per_worker
from elastic_train.planner.mesh_candidates import RECOMPUTES
from elastic_train.planner.model_shape import ModelShape
from elastic_train.planner.plan import Infeasible, Plan, Recompute
from elastic_train.planner.problem import Problem
from elastic_train.planner.question import Planned, Question
from elastic_train.planner.scoring import memory_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """The planner of one run, as a value.

    With the model's layers and the hardware known, the plan of most predicted goodput is sought among all,
    with `recompute`, `virtual` stages per rank and split backwards (`zero_bubble`) that may be tried. Else it
    is the data-parallel plan that keeps most copies. `data_first`: that one as long as it fits, no other axis
    is asked for, and none of the workers are left to other axes.
    """

    micro_batches: int
    constraints: Parallelism = field(default_factory=Parallelism)
    shape: ModelShape | None = None
    memory_bytes: int | None = None
    hardware: Hardware | None = None
    recompute: tuple[Recompute, ...] = RECOMPUTES
    virtual: tuple[int, ...] = (1, 2, 4)
    zero_bubble: bool = True
    data_first: bool = False

    def __call__(self, question: Question, /) -> Planned | Infeasible:
        known = self
        for plan in question.exceeded:
            known = known._below(plan, question)
        return known._chosen(question)

    def _chosen(self, question: Question) -> Planned | Infeasible:
        problem = self.problem(question)
        if problem is None:
            return self._data_parallel(question)
        if self.data_first and not self.constraints.divides_the_model:
            simple = self._data_parallel(question)
            if not (isinstance(simple, Infeasible) or opens_the_model(self.constraints, question.room)):
                return simple
        chosen = choose(problem)
        if isinstance(chosen, Infeasible):
            return chosen
        scored, reason = chosen
        return Planned(
            plan=scored.plan,
            reason=reason,
            moves_live=scored.moves_live,
            moved=scored.moves.most,
            step_s=scored.cost.step_s,
        )

    def _below(self, plan: Plan, question: Question) -> Search:
        """With less memory than each model of it says that a plan needs which needed more than there is."""
        if self.shape is None:
            return self
        known = self
        if plan.mesh.dp == plan.mesh.size:
            needed = memory_per_worker(self.shape, plan.mesh).training
            known = replace(self, memory_bytes=_less(self.memory_bytes, needed))
        problem = self.problem(replace(question, held=None))
        if problem is not None and self.hardware is not None:
            hardware = self.hardware
            there = _less(hardware.memory_bytes, memory_of(problem, plan).training)
            known = replace(known, hardware=replace(hardware, memory_bytes=there))
        return known

    def _data_parallel(self, question: Question) -> Planned | Infeasible:
        plain = DataParallel(
            micro_batches=self.micro_batches,
            constraints=self.constraints,
            shape=self.shape,
            memory_bytes=self.memory_bytes,
            bytes_per_s=math.inf if self.hardware is None else self.hardware.between.bytes_per_s,
        )
        return plain(question)

    def problem(self, question: Question) -> Problem | None:
        """The whole search's problem; None where layers or hardware are not known."""
        if self.shape is None or not self.shape.layers or self.hardware is None:
            return None
        return Problem(
            worker_slots=question.worker_slots,
            most=question.most,
            shape=self.shape,
            hardware=self.hardware,
            micro_batches=self.micro_batches,
            constraints=self.constraints,
            outlook=question.outlook,
            previous=question.held,
            virtual=self.virtual,
            recompute=self.recompute,
            zero_bubble=self.zero_bubble,
        )


def _less(there: int | None, needed: int) -> int:
    return needed - 1 if there is None else min(there, needed - 1)


def opens_the_model(constraints: Parallelism, workers: int) -> bool:
    """Whether the axes of data are fixed to fewer ranks than there are workers, and stages or tp, to which
    the others are left, are the planner's to choose.
    """
    if constraints.dp_replicate is None or constraints.dp_shard is None:
        return False
    ranks = constraints.dp_replicate * constraints.dp_shard * constraints.together
    return ranks < workers and None in (constraints.tp, constraints.pp)


def planner_for(
    spec: RunSpec,
    *,
    shape: ModelShape | None = None,
    memory_bytes: int | None = None,
    hardware: Hardware | None = None,
) -> Search:
    """The planner of a run; without a shape and a size every mesh is taken to fit.

    One stage per rank is what workers run.
    """
    return Search(
        micro_batches=spec.batch.micro_batches,
        constraints=spec.parallelism,
        shape=shape,
        memory_bytes=memory_bytes,
        hardware=hardware,
        virtual=(1,),
        data_first=True,
    )
