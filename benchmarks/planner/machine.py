"""What benchmarks/planner tells the planner of this machine.

Seconds of the layers and of the optimizer come from one worker's steps; latency and bandwidth from sums over
two workers.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.problem import Problem
from elastic_train.planner.hardware import Hardware, Link
from elastic_train.planner.model_shape import ModelShape
from elastic_train.planner.plan import Plan
from elastic_train.testing.gang import Gang
from elastic_train.train.profile import profiled_shape

SMALL, LARGE = 1 << 10, 8 << 20
REPEATED = 30

State = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The layers with their seconds, and the links."""

    shape: ModelShape
    hardware: Hardware
    alone_s: float  # a step of one worker

    @classmethod
    def of(cls, gang: Gang, task: Problem, step_s: Callable[[Plan], float]) -> Machine:
        per_element = update_s(task)
        shape = profiled_shape(task, gang.spec, flops_per_s=1.0)
        alone = statistics.median(step_s(gang.plan(1, 1)) for _ in range(3))
        computing = alone - per_element * shape.parameters
        scale = computing / gang.spec.batch.micro_batches / sum(row.seconds for row in shape.layers)
        layers = tuple(replace(row, seconds=row.seconds * scale) for row in shape.layers)
        between = link(gang)
        hardware = Hardware(
            inside=between,
            between=between,
            cores=len(os.sched_getaffinity(0)),
            one_machine=True,
            update_s=per_element,
        )
        return cls(shape=replace(shape, layers=layers), hardware=hardware, alone_s=alone)

    def reported(self) -> dict[str, float]:
        """In numbers, for the record."""
        link = self.hardware.inside
        return {
            "alone_s": self.alone_s,
            "block_s": self.shape.layers[1].seconds,
            "update_s": self.hardware.update_s * self.shape.parameters,
            "latency_s": link.latency_s,
            "bytes_per_s": link.bytes_per_s,
        }


def link(gang: Gang) -> Link:
    """Hockney's alpha and beta of a sum over two workers: it sends its bytes once there and once back."""
    gang.form(gang.plan(2, 1))
    small, large = (max(gang.pool.run(summed, n, ranks=[0, 1])) for n in (SMALL, LARGE))
    latency = small / 2
    return Link(latency_s=latency, bytes_per_s=LARGE / max(large - small, 1e-9))


def summed(state: State, nbytes: int) -> float:
    """Seconds of a sum of so many bytes over the ranks of the formed group, the median."""
    data, times = torch.zeros(nbytes // 4), []
    for _ in range(REPEATED):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(data)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def update_s(task: Problem) -> float:
    """The optimizer's seconds for one element, on one core."""
    model = task.model()
    optimizer = task.optimizer(model.named_parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        optimizer.step()
        times.append(time.perf_counter() - began)
    return statistics.median(times) / sum(p.numel() for p in model.parameters())
