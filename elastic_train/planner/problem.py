"""Input of the plan search: model, workers, hardware, constraints, the running plan."""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic_train.config import Parallelism
from elastic_train.planner.goodput_model import Outlook
from elastic_train.planner.hardware import Fleet, Hardware
from elastic_train.planner.mesh_candidates import RECOMPUTES
from elastic_train.planner.model_shape import ModelShape
from elastic_train.planner.plan import Plan, Recompute, WorkerSlot


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What a plan is sought for."""

    worker_slots: tuple[WorkerSlot, ...]
    shape: ModelShape
    hardware: Hardware
    micro_batches: int
    constraints: Parallelism = field(default_factory=Parallelism)
    outlook: Outlook = field(default_factory=Outlook)
    previous: Plan | None = None
    most: int | None = None  # ranks that a plan may have
    virtual: tuple[int, ...] = (1, 2, 4)  # stages per rank that may be tried
    recompute: tuple[Recompute, ...] = RECOMPUTES  # likewise
    zero_bubble: bool = False  # whether backwards may be split

    @property
    def fleet(self) -> Fleet:
        return Fleet.of(self.worker_slots, self.most)
