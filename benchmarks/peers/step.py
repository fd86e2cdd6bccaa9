"""One step of data-parallel training as peers write it: a rank's micro-batches, then the update."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.problem import Problem, Tokens
from benchmarks.recovery.cases import GLOBAL_BATCH, MICRO_BATCH


def train_step(
    problem: Problem, data: Tokens, model: Any, optimizer: Any, step: int, *, rank: int, world: int
) -> None:
    for micro in range(rank, GLOBAL_BATCH // MICRO_BATCH, world):
        first = step * GLOBAL_BATCH + micro * MICRO_BATCH
        batch = torch.stack([data[(first + i) % len(data)] for i in range(MICRO_BATCH)])
        loss, count = problem.loss(model(batch), batch)
        (loss / count).backward()
    optimizer.step()
    optimizer.zero_grad()
