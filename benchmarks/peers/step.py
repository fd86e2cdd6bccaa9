"""One step of data-parallel training as peers write it: a rank's micro-batches, then the update."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.problem import Problem, Tokens
from benchmarks.recovery.cases import GLOBAL_BATCH, MICRO_BATCH


def train_step(
    problem: Problem,
    data: Tokens,
    model: Any,
    optimizer: Any,
    step: int,
    *,
    rank: int,
    world: int,
    global_size: int = GLOBAL_BATCH,
    micro_size: int = MICRO_BATCH,
) -> None:
    for micro in range(rank, global_size // micro_size, world):
        first = step * global_size + micro * micro_size
        batch = torch.stack([data[(first + i) % len(data)] for i in range(micro_size)])
        loss, count = problem.loss(model(batch), batch)
        (loss / count).backward()
    optimizer.step()
    optimizer.zero_grad()
