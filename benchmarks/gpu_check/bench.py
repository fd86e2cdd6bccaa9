"""What claims are tried on: processes on the device, one on the CPU, and what that computed.

As many processes as there are devices, two at the most, each with one of its own, form groups as a run's
workers do, with the library's own members.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from benchmarks.problem import Problem
from elastic_train.config import Batch, RunSpec
from elastic_train.planner.plan import Mesh, Plan
from elastic_train.testing.gang import Gang
from elastic_train.testing.gloo_pool import GlooPool
from elastic_train.train.member import StepReport

STEPS = 6
TASK = Problem(seq_len=16, samples=64)
SPEC = RunSpec(
    name="gpu-check",
    storage_path="/nowhere",
    batch=Batch(global_size=8, micro_size=2, seed=7),
    max_steps=STEPS,
    min_workers=1,
    max_workers=2,
    precision="fp64",
    clip_norm=1.0,
)
ALONE = Mesh()
OF_TWO = (Mesh(dp_replicate=2), Mesh(dp_shard=2), Mesh(tp=2), Mesh(cp=2), Mesh(pp=2))
STAGES = ((0, 2), (2, 4))
NEAR = 1e-9


class Unlike(Exception):
    """A claim does not hold; the words say what was found instead."""


@dataclass(slots=True, eq=False)
class Bench:
    """The processes on the device, one on the CPU, and what that computed."""

    device: str
    pool: GlooPool
    host: GlooPool
    losses: list[float] = field(default_factory=list)
    state: dict[tuple[str, str], np.ndarray] = field(default_factory=dict)

    @property
    def meshes(self) -> tuple[Mesh, ...]:
        return (ALONE, *OF_TWO) if self.pool.size > 1 else (ALONE,)

    def gang(self, **changes: Any) -> Gang:
        return Gang(self.pool, TASK, replace(SPEC, **changes))

    def compute_on_host(self) -> None:
        gang = Gang(self.host, TASK, SPEC)
        gang.form(gang.plan_on(ALONE))
        self.losses, self.state = [r.loss for r in gang.run()], gang.whole()

    def check_losses(self, losses: Sequence[float], first: int = 1, near: float = NEAR) -> float:
        """The largest difference to the CPU's, relative; Unlike above `near`."""
        return far_apart(losses, self.losses[first - 1 :], near)


def far_apart(losses: Sequence[float], expected: Sequence[float], near: float = NEAR) -> float:
    """The largest difference of the first to the others, relative; Unlike above `near`."""
    found = float(np.max(np.abs(np.array(losses) - expected) / np.abs(expected)))
    if not found <= near:
        raise Unlike(f"losses {list(losses)} where the CPU has {list(expected)}")
    return found


def plan_of(gang: Gang, mesh: Mesh) -> Plan:
    return gang.plan_on(mesh, stages=STAGES if mesh.pp > 1 else ())


def losses_of(reports: Sequence[StepReport]) -> list[float]:
    """One a step: one with metrics is told again."""
    return list({r.step: r.loss for r in reports}.values())
