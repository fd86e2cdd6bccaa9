"""What a task may say beside its loss: the step, metrics, an average, schedules and ends by evaluations. Each
as a plain loop of one process would, on every way.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from elastic_train.data.order import SampleOrder
from elastic_train.errors import ConfigError
from elastic_train.testing.gang import Gang
from elastic_train.testing.gloo_pool import GlooPool
from elastic_train.testing.single_process_run import train_alone
from elastic_train.train.model.collate import collate
from elastic_train.train.model.plain_build import default_dtype
from elastic_train.train.step.training_loop import StepReport
from elastic_train.train.task import Average, Evaluation
from tests.train.programs import SAMPLES, SEED, STEPS, WAYS, Fit, Net, Points, spec

pytestmark = pytest.mark.ring2

DECAY = 0.7


class Says(Fit):
    """The loss is weighed by the step; rates are halved where the metric does not rise."""

    evaluated = True
    patience: int | None = None

    def optimizer(self, named_params: Any) -> torch.optim.Optimizer:
        named = dict(named_params)
        # The bias has no gradient before step 3.
        return torch.optim.AdamW(named.values(), lr=0.05)

    def model(self) -> nn.Module:
        return Late()

    def loss(self, output: Any, micro_batch: Any, step: int) -> Any:
        out, extra = output
        total = (out - micro_batch["y"]).square().sum() / step
        return (total + extra.square().sum() if step > 2 else total), len(out)

    def metrics(self, output: Any, micro_batch: Any) -> Any:
        return {"close": off(output, micro_batch)["off"]}

    def average(self) -> Average:
        return Average(decay=DECAY, evaluated=self.evaluated)

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, mode="max", patience=0, factor=0.5
        ), "off"

    def evaluation(self) -> Evaluation:
        return Evaluation(
            dataset=Points(),
            metric=off,
            every=1,
            patience=self.patience,
            watch="off" if self.patience else "",
        )


def off(output: Any, micro_batch: Any) -> dict[str, Any]:
    out = output[0].detach()
    return {"off": ((out - micro_batch["y"]).abs().sum(), len(out)), "rows": (len(out), 1)}


class Late(Net):
    """A parameter without a gradient at first."""

    def __init__(self) -> None:
        super().__init__()
        self.late = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), self.late


class OfTheModel(Says):
    """The parameters themselves are evaluated."""

    evaluated = False


class Stops(OfTheModel):
    """Sooner than there are steps."""

    patience = 1

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        return None

    def evaluation(self) -> Evaluation:
        return replace(super().evaluation(), order="max")  # it falls, which is no better


@pytest.fixture(scope="module")
def expected() -> Any:
    found: dict[str, Any] = {}

    def of(task: Says) -> Any:
        return found.setdefault(type(task).__name__, _plain(task))

    return of


def _plain(task: Says) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """By step: loss, metrics and rate; the average at the end."""
    torch.manual_seed(SEED)
    with default_dtype(torch.float64):
        model = task.model()
    optimizer = task.optimizer(model.named_parameters())
    made = task.schedule(optimizer)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    order, data, said = SampleOrder(SAMPLES, spec(1).batch), Points(), list[dict[str, float]]()
    best, waited = -np.inf, 0
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        sums = np.zeros(3)
        for batch in _batches(data, [micro.ids for micro in order.micro_batches(step)]):
            output = model(batch["x"])
            loss, count = task.loss(output, batch, step)
            (loss / 8).backward()
            sums += [float(loss.detach()), float(off(output, batch)["off"][0]), count]
        rate = optimizer.param_groups[0]["lr"]
        optimizer.step()
        average.update_parameters(model)
        measured = copy.deepcopy(average.module if task.evaluated else model).eval()
        with torch.no_grad():
            parts = [
                off(measured(b["x"]), b)["off"] for b in _batches(data, np.arange(SAMPLES).reshape(-1, 2))
            ]
        value = float(sum(part[0] for part in parts)) / SAMPLES
        if made is not None:
            made[0].step(value)
        said.append({"loss": sums[0] / sums[2], "close": sums[1] / sums[2], "rate": rate, "off": value})
        waited = 0 if value > best else waited + 1
        best = max(best, value)
        if task.patience is not None and waited >= task.patience:
            break
    return said, dict(average.module.named_parameters())


def _batches(data: Points, numbers: Any) -> Iterator[Any]:
    for ids in numbers:
        yield collate([data[int(i)] for i in ids], torch.device("cpu"), torch.float64)


def _said(reports: list[StepReport]) -> list[dict[str, float]]:
    """One a step: a report of an evaluation says the step again."""
    found: dict[int, dict[str, float]] = {}
    for report in reports:
        own = found.setdefault(report.step, {"loss": report.loss, "rate": report.rates[0]})
        own.update(dict(report.metrics))
    return list(found.values())


def _held(found: list[dict[str, float]], wanted: list[dict[str, float]]) -> None:
    assert len(found) == len(wanted)
    for step, (has, wants) in enumerate(zip(found, wanted, strict=True)):
        for name, value in wants.items():
            np.testing.assert_allclose(has[name], value, rtol=1e-10, err_msg=f"{name} of step {step + 1}")


@pytest.mark.parametrize("task", [Says(), OfTheModel()], ids=lambda task: type(task).__name__)
@pytest.mark.parametrize(
    "way", [pytest.param(w, marks=() if w == "2-3-1" else pytest.mark.matrix) for w in WAYS]
)
def test_steps_metrics_averages_and_schedules_by_evaluations_are_those_of_a_plain_loop(
    pool: GlooPool, expected: Any, task: Says, way: str
) -> None:
    wanted, average = expected(task)
    assert len({said["rate"] for said in wanted}) > 1, "the schedule has to do something"
    gang, origin, reports = Gang(pool, task, spec(4)), None, list[StepReport]()
    for (replicate, shard), processes, stop in WAYS[way]:
        gang.form(gang.plan(replicate, shard), processes, origin)
        reports += gang.run() if stop == STEPS else gang.pause_at(stop)
        origin = gang.held()
    _held(_said(reports), wanted)
    whole = gang.whole()
    for name, value in average.items():
        np.testing.assert_allclose(whole[name, "average"], value.detach().numpy(), rtol=1e-9, err_msg=name)


def test_a_run_ends_where_its_evaluations_get_no_better_also_across_a_move(
    pool: GlooPool, expected: Any
) -> None:
    wanted, _ = expected(Stops())
    assert 1 < len(wanted) < STEPS
    gang = Gang(pool, Stops(), spec(4))
    gang.form(gang.plan(1, 1), [0])
    reports = gang.pause_at(1)
    gang.form(gang.plan(2, 1), [1, 2], gang.held())
    reports += gang.run()
    _held(_said(reports), wanted)
    assert reports[-1].last
    gang.form(gang.plan(1, 1), [3], gang.held())  # it was broken off before anybody heard of the end
    assert [(report.step, report.last) for report in gang.run()] == [(len(wanted), True)]


class Unknown(Says):
    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), "of"


class Ambiguous(Says):
    def evaluation(self) -> Evaluation:
        return Evaluation(dataset=Points(), metric=off, every=1, patience=3)


class WithoutPairs(Says):
    def metrics(self, output: Any, micro_batch: Any) -> Any:
        return {"close": 0.5}


class Twice(Says):
    def metrics(self, output: Any, micro_batch: Any) -> Any:
        return {"off": (1, 1)}


@pytest.mark.parametrize(
    ("task", "says"),
    [
        (
            Unknown(),
            r"task.schedule: it is to be stepped by 'of', which no evaluation measures. There is 'off'",
        ),
        (Ambiguous(), "task.evaluation.watch: there are several metrics. There is 'off', 'rows'"),
        (WithoutPairs(), "task.metrics: 'close' must be a pair"),
        (Twice(), "task.metrics: 'off' is what the evaluation measures, too"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(task: Says, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        train_alone(task, spec(2))
