"""What is said in epochs: how long a run is, when it saves and evaluates, and where a loop is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ray.train import RunConfig

import elastic_train as et
from elastic_train.errors import ConfigError
from elastic_train.testing.gang import Gang
from elastic_train.testing.gloo_pool import GlooPool
from elastic_train.train.declaration.loop_task import task_of
from elastic_train.train.step.training_loop import StepReport
from elastic_train.train.task import Evaluation
from tests.train.programs import Fit, Net, Points, spec

pytestmark = pytest.mark.ring2

BATCH = et.Batch(global_size=7, micro_size=2)  # 24 samples: three whole steps and a smaller one


class EachEpoch(Fit):
    def evaluation(self) -> Evaluation:
        return Evaluation(dataset=Points(), every="epoch")


class Remembers(Fit):
    """Keeps the data that it opened."""

    def dataset(self) -> Any:
        self.opened = Points()
        return self.opened


def by_epoch(ctx: Any) -> None:
    """Its rate falls with each epoch."""
    net = ctx.model("net", Net)
    optimizer = ctx.optimizer("opt", torch.optim.SGD, net, lr=1e-2)
    for batch in ctx.batches(Points):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * 0.5**batch.epoch
        with ctx.step() as step:
            for micro in batch:
                step.backward((net(micro["x"]) - micro["y"]).square().mean())
        if batch.step % batch.steps_per_epoch == 0:
            ctx.report(epoch=batch.epoch + 1)


def trainer(task: Any, **options: Any) -> et.ElasticTrainer:
    return et.ElasticTrainer(
        task, batch=BATCH, run_config=RunConfig(name="epochs", storage_path="/nowhere"), **options
    )


@pytest.mark.parametrize("task", [Fit(), by_epoch], ids=["task", "loop"])
def test_a_run_of_so_many_epochs_has_their_steps(task: Any) -> None:
    made = trainer(task, max_epochs=3, checkpoints=et.Checkpoints(every="epoch"))
    assert (made.spec.max_steps, made.spec.checkpoints.every) == (12, 4)


def test_what_opening_the_data_leaves_in_a_task_does_not_go_to_other_machines() -> None:
    task = Remembers()
    assert trainer(task, max_epochs=1).spec.max_steps == 4
    assert vars(task) == {}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "max_steps: and max_epochs are both missing"),
        ({"max_steps": 2, "max_epochs": 2}, "max_steps: and max_epochs are both given"),
        ({"max_epochs": 0}, "max_epochs: must be positive"),
        ({"max_epochs": 1.5}, "max_epochs: must be"),
    ],
)
def test_how_long_a_run_is_is_said_once(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        trainer(Fit(), **options)


def test_evaluations_of_each_epoch_and_loops_that_count_them_see_the_same_under_a_move(
    pool: GlooPool,
) -> None:
    assert [r.step for r in _moved(pool, EachEpoch()) if r.metrics] == [3, 6]
    reports = _moved(pool, task_of(by_epoch))
    assert [(r.step, r.metrics) for r in reports if r.metrics] == [
        (3, (("epoch", 1.0),)),
        (6, (("epoch", 2.0),)),
    ]
    rates = {r.step: r.rates for r in reports}
    assert [rates[step] for step in sorted(rates)] == [(1e-2,)] * 3 + [(0.5e-2,)] * 3


def _moved(pool: GlooPool, task: Any) -> list[StepReport]:
    """Six steps, of which three are an epoch, by two processes and then one of another."""
    gang = Gang(pool, task, spec(4))
    gang.form(gang.plan(2, 1), [0, 1])
    reports = gang.pause_at(2)
    gang.form(gang.plan(1, 1), [2], gang.held())
    return reports + gang.run()
