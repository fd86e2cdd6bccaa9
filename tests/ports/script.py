"""What a port is held to: a script of plain torch, in one process, that has the run's batches and draws."""

from __future__ import annotations

import ast
import os
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from elastic_train.config import Batch
from elastic_train.data.order import SampleOrder
from elastic_train.train.model.collate import collate
from elastic_train.train.model.plain_build import default_dtype
from elastic_train.train.model.rng import Randomness, derive, seed_all
from elastic_train.train.model.several_models import Models

PORTS = Path(os.environ.get("PORTS", ""))
if os.environ.get("PORTS"):
    sys.path += [str(PORTS), str(PORTS / "orig")]


def definitions(file: str, *names: str, **known: Any) -> dict[str, Any]:
    """Classes and functions of a script that can't be imported, since it trains where it is."""
    body = ast.parse((PORTS / "orig" / file).read_text()).body
    wanted: list[ast.stmt] = [
        n for n in body if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name in names
    ]
    made = dict(known, __name__=Path(file).stem)
    exec(compile(ast.Module(wanted, []), file, "exec"), made)
    return made


@dataclass(kw_only=True)
class Given:
    """A step's batch. Each pass over it draws anew, as in a run."""

    step: int
    steps_per_epoch: int
    samples: list[list[Any]]
    randomness: Randomness
    dtype: torch.dtype
    passes: int = 0

    @property
    def size(self) -> int:
        return sum(len(each) for each in self.samples)

    @property
    def ends_epoch(self) -> bool:
        return self.step % self.steps_per_epoch == 0

    def __iter__(self) -> Iterator[Any]:
        first = self.passes * len(self.samples)
        self.passes += 1
        for number, samples in enumerate(self.samples):
            with self.randomness.micro_batch(self.step, first + number):
                yield collate(samples, torch.device("cpu"), self.dtype)


@dataclass(kw_only=True)
class Script:
    """A run of one process, in the number format of the run that is compared with it."""

    batch: Batch
    steps: int
    clip_norm: float | None
    dtype: torch.dtype = torch.float64
    losses: list[float] = field(default_factory=list[float])
    told: dict[int, dict[str, float]] = field(default_factory=dict[int, dict[str, float]])

    def __post_init__(self) -> None:
        self.models = Models()  # by name, from which their blocks draw
        random.seed(self.batch.seed)
        np.random.seed(self.batch.seed)
        torch.manual_seed(self.batch.seed)

    def model(self, name: str, build: Callable[[], nn.Module]) -> Any:
        with default_dtype(self.dtype):
            self.models.add_module(name, build())
        return getattr(self.models, name)

    def batches(self, data: Any) -> Iterator[Given]:
        randomness = Randomness(self.models, seed=self.batch.seed)
        order = SampleOrder(len(data), self.batch)
        for step in range(1, self.steps + 1):
            seed_all(derive(self.batch.seed, "loop", step))
            yield Given(
                step=step,
                steps_per_epoch=order.steps_per_epoch,
                samples=[[data[i] for i in micro.ids] for micro in order.micro_batches(step)],
                randomness=randomness,
                dtype=self.dtype,
            )

    def clip(self, model: nn.Module) -> None:
        if self.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), self.clip_norm)

    def whole(self, data: Any) -> Any:
        """A data set as one batch."""
        return collate([data[i] for i in range(len(data))], torch.device("cpu"), self.dtype)

    def tell(self, step: int, **metrics: Any) -> None:
        self.told.setdefault(step, {}).update({name: float(value) for name, value in metrics.items()})
