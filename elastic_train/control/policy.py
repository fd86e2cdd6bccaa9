"""The policy of a run: configured limits and timings, and the planner, as one value for transitions."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace

from elastic_train.config import Checkpoints, RunSpec, Timing
from elastic_train.planner.question import Planner


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Everything that a transition is given besides the state and the event."""

    plan: Planner
    min_workers: int
    max_workers: int
    standby: int
    max_steps: int
    max_failures: int
    checkpoints: Checkpoints
    timing: Timing
    peers: bool = False  # whether nodes have peer stores
    prepares: bool = False  # whether the next group is made ready before the present one pauses
    logs: bool = False  # whether stages log what they send
    each: str = ""  # what a worker needs, for people: " of 1 CPU"
    spread: bool = False  # workers over nodes, before a node gets a second one
    not_finite: int = 20  # steps in a row without a finite loss and gradient that end the run
    evict_slower_than: float | None = None  # times the median of the others from which a node is left
    flaps: int = 3  # workers of a node that ended before they were of use, until it is quarantined
    flap_window_s: float = 600.0
    quarantine_s: float = 60.0  # doubles with every further quarantine of the node
    quarantine_limit_s: float = 3600.0
    restarts: int = 10  # of the controller without a committed step between them
    preemptions: int | None = None  # interruptions by machines that were taken away; None: any number
    unsaved: int | None = None  # checkpoints in a row that could not be written, which end the run
    unsaved_s: float | None = None  # seconds of the same
    salt: int = 0  # differs between runs, which then do not all do the same at once
    late_ticks: float = 3.0  # periods that a tick may be late before running deadlines are moved

    def within(self, ended: int | None) -> Policy:
        """The policy of a run whose own loop ended it, at a step before the last."""
        return self if ended is None else replace(self, max_steps=ended)

    @classmethod
    def of(cls, spec: RunSpec, plan: Planner) -> Policy:
        return cls(
            plan=plan,
            min_workers=spec.min_workers,
            max_workers=spec.max_workers,
            standby=spec.standby,
            max_steps=spec.max_steps,
            max_failures=spec.max_failures,
            checkpoints=spec.checkpoints,
            timing=spec.timing,
            peers=spec.checkpoints.peers is not None,
            prepares=True,
            evict_slower_than=spec.evict_slower_than,
            logs=spec.boundary_logs is not None,
            spread=spec.placement == "SPREAD",
            not_finite=spec.not_finite,
            restarts=spec.max_restarts,
            preemptions=spec.max_preemptions,
            unsaved=spec.unsaved,
            unsaved_s=spec.unsaved_s,
            each=f" of {needs(spec)}",
            salt=zlib.crc32(f"{spec.storage_path}/{spec.name}".encode()),
        )

    @property
    def tick_s(self) -> float:
        """Seconds between two ticks."""
        return self.timing.heartbeat_s

    @property
    def target(self) -> int:
        """Workers to have where there is room: those of the largest plan and the standby."""
        return self.max_workers + self.standby


def needs(spec: RunSpec) -> str:
    """What a worker takes of a node, in words."""
    parts = [
        f"{amount:g} {name}"
        for name, amount in (("CPU", spec.cpus_per_worker), ("GPU", spec.gpus_per_worker))
        if amount
    ]
    where = [*((spec.accelerator,) if spec.accelerator is not None else ()), *map("=".join, spec.labels)]
    return " and ".join(parts) + (f" on {' and '.join(where)}" if where else "")
