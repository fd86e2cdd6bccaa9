"""A step of a loop while it is under way, and the batch that it trains on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from elastic_train.errors import ConfigError
from elastic_train.train.custom.agreed_number import agreed_number
from elastic_train.train.custom.agreed_update import Agreed
from elastic_train.train.custom.loop_stepper import LoopStepper
from elastic_train.train.declaration.abort import aborting
from elastic_train.train.step.training_loop import StepReport


class StepBatch:
    """The samples of one step."""

    def __init__(
        self,
        passes: LoopStepper,
        step: int,
        steps_per_epoch: int,
        iterated: Callable[[Iterator[Any]], Iterator[Any]],
    ) -> None:
        self.step, self.epoch, self.steps_per_epoch = step, (step - 1) // steps_per_epoch, steps_per_epoch
        self._passes, self._iterated = passes, iterated

    @property
    def index(self) -> int:
        job = self._passes.job
        if job is None:
            raise ConfigError(
                field="batch.index",
                problem="there is no micro-batch.",
                remedy="Read it in the loop over the batch.",
            )
        return job.micro_batch.index

    def __iter__(self) -> Iterator[Any]:
        return self._iterated(self._passes.micro_batches())


class StepOfLoop:
    """A step that is under way, and then its outcome."""

    def __init__(
        self,
        passes: LoopStepper,
        fence: Callable[[], None],
        metrics: tuple[str, ...] | None,
        measured: list[str],
    ) -> None:
        """`measured` are the names that all ranks know so far, where `metrics` are any."""
        self._passes, self._fence = passes, fence
        self._any, self._measured = metrics is None, measured
        self._sums = dict.fromkeys(metrics or (), (0.0, 0.0))
        self.loss = self.grad_norm = math.nan
        self.skipped = False
        self.metrics: dict[str, float] = {}

    def backward(self, loss: torch.Tensor, count: Any = None, *, retain_graph: bool = False) -> None:
        with aborting():
            self._passes.backward(loss, count, retain_graph)

    def update(self, optimizer: torch.optim.Optimizer) -> Agreed:
        with aborting():
            return self._passes.update(optimizer, self._fence)

    def closure(self, optimizer: torch.optim.Optimizer, compute: Callable[[], object]) -> Agreed:
        with aborting():
            return self._passes.closure(optimizer, compute, self._fence)

    def measure(self, **metrics: tuple[Any, Any]) -> None:
        for name, (total, count) in metrics.items():
            if name not in self._sums and not self._any:
                raise ConfigError(
                    field=f"step.measure({name}=...)",
                    problem="the step was not begun with it.",
                    remedy=f"with ctx.step(metrics=({name!r},)) as step:",
                )
            if not self._passes.filling:
                before = self._sums.get(name, (0.0, 0.0))
                self._sums[name] = before[0] + float(total), before[1] + float(count)

    def agree(self, number: int | None) -> int:
        with aborting():
            return agreed_number(number, lambda table: self._passes.over_ranks(table, "agreeing"))

    def end(self, commit: Callable[[int], StepReport], world_size: int) -> None:
        self.metrics = self._passes.means(self._sums, self._measured if self._any else None)
        report = commit(self._passes.number)
        self.loss, self.grad_norm, self.skipped = report.loss, report.grad_norm, report.skipped
