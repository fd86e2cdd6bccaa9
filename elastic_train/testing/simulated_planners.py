"""Planners that cost nothing, for simulated runs."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from elastic_train.planner.plan import Infeasible, Mesh, Plan, even_shares
from elastic_train.planner.question import Planned, Question

MICRO_BATCHES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SimplePlanner:
    """`replicas` of everything, where as many divide the workers, the rest shards; None: replicas only.

    Sequences are divided over `context` workers, where as many divide all.
    """

    replicas: int | None = 1
    context: int = 1

    def __call__(self, question: Question, /) -> Planned | Infeasible:
        worker_slots = question.worker_slots[: question.most]
        if not worker_slots:
            return Infeasible(reason="no workers")
        cp = self.context if len(worker_slots) % self.context == 0 else 1
        most = len(worker_slots) // cp
        replicas = most if self.replicas is None else self.replicas if most % self.replicas == 0 else 1
        mesh = Mesh(dp_replicate=replicas, dp_shard=most // replicas, cp=cp)
        plan = Plan(
            mesh=mesh,
            workers=tuple(s.worker for s in worker_slots),
            nodes=tuple(s.node for s in worker_slots),
            shares=even_shares(MICRO_BATCHES, mesh.dp),
        )
        return Planned(plan=plan, reason=f"all {len(worker_slots)} workers")


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlanner:
    """One stage on each worker, of four blocks."""

    blocks: int = 4

    def __call__(self, question: Question, /) -> Planned | Infeasible:
        worker_slots = question.worker_slots[: question.most]
        if not worker_slots:
            return Infeasible(reason="no workers")
        edges = [self.blocks * n // len(worker_slots) for n in range(len(worker_slots) + 1)]
        plan = Plan(
            mesh=Mesh(pp=len(worker_slots)),
            workers=tuple(s.worker for s in worker_slots),
            nodes=tuple(s.node for s in worker_slots),
            shares=even_shares(MICRO_BATCHES, 1),
            stages=tuple(pairwise(edges)),
        )
        return Planned(plan=plan, reason=f"a stage on each of {len(worker_slots)} workers")
