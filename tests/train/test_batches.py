"""Batches and outputs of any shape train as in a plain loop, under every plan and across moves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from elastic_train.config import Batch, RunSpec
from elastic_train.errors import ConfigError, UserCodeError
from elastic_train.testing.gang import Gang
from elastic_train.testing.gloo_pool import GlooPool
from elastic_train.testing.reference import assert_state_near, reference
from elastic_train.testing.single_process_run import train_alone
from elastic_train.train.declaration.loop_task import LoopTask
from elastic_train.train.task import Evaluation, check_task
from tests.tasks.tiny import TinyTask
from tests.train.programs_of_batches import ALONE, PROGRAMS, Program, Vectors, as_mapping

pytestmark = pytest.mark.ring2


def spec(**batch: Any) -> RunSpec:
    """Two epochs of three steps: 23 samples by 9 in micro-batches of 3, the last one of 2."""
    return RunSpec(
        name="batches",
        storage_path="/nowhere",
        batch=Batch(**{"global_size": 9, "micro_size": 3, "seed": 11, **batch}),
        max_steps=6,
        min_workers=1,
        max_workers=4,
        precision="fp64",
    )


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_shape_of_batch_trains_as_in_a_plain_loop(pool: GlooPool, name: str) -> None:
    task, run = PROGRAMS[name], spec()
    gang = Gang(pool, task, run)
    gang.form(gang.plan(1, 1))
    expected = reference(task, run, gang.whole())
    measured = [r.metrics for r in gang.run() if r.metrics]
    assert len(measured) == 2
    for mesh in [(1, 1), (2, 1), (1, 2)]:
        gang.form(gang.plan(*mesh))
        reports = gang.run()
        losses = list({r.step: r.loss for r in reports}.values())
        np.testing.assert_allclose(losses, expected.losses, rtol=1e-12, err_msg=str(mesh))
        np.testing.assert_allclose(
            [dict(r.metrics)["eval_loss"] for r in reports if r.metrics],
            [dict(m)["eval_loss"] for m in measured],
            rtol=1e-12,
        )
        assert_state_near(gang.whole(), expected.state)
    gang.form(gang.plan(2, 1))
    gang.pause_at(2)
    gang.form(gang.plan(3, 1), origin=gang.held())
    gang.pause_at(4)
    gang.form(gang.plan(1, 1), origin=gang.held())
    gang.run()
    assert_state_near(gang.whole(), expected.state)


class Lookalike(TinyTask):
    def collate_fn(self, samples: list[Any]) -> Any:
        return samples


class Attribute(TinyTask):
    def __init__(self) -> None:
        super().__init__()
        self.collate_fn = list


@pytest.mark.parametrize("kind", [Lookalike, Attribute])
def test_a_method_that_nothing_would_call_is_refused_by_name(kind: type[TinyTask]) -> None:
    with pytest.raises(ConfigError, match=r"task.collate_fn: nothing calls .* Rename it to collate"):
        check_task(kind())


def test_a_helper_beside_the_real_method_may_have_any_name() -> None:
    class Both(TinyTask):
        def collate(self, samples: list[Any]) -> Any:
            return super().collate(self.collate_fn(samples))

        def collate_fn(self, samples: list[Any]) -> Any:
            return samples

    check_task(Both())


def test_what_the_last_micro_batch_of_an_epoch_cannot_do_is_told_before_the_first_step() -> None:
    steps: list[int] = []
    with pytest.raises(UserCodeError, match="more than 1 value per channel") as caught:
        steps += [report.step for report in train_alone(ALONE, spec())]
    assert not steps
    assert caught.value.phase == "forward"
    kept = train_alone(ALONE, spec(drop_last=True))
    assert [report.step for report in kept][-1] == 6


def test_a_metric_that_fails_is_told_before_the_first_step() -> None:
    def metric(output: Any, batch: Any) -> Any:
        return (output.view(3, 2).sum(), 3)

    class Measured(Program):
        def evaluation(self) -> Evaluation:
            return Evaluation(dataset=Vectors(as_mapping, 7), metric=metric, every=5)

    with pytest.raises(UserCodeError, match="shape '\\[3, 2\\]' is invalid") as caught:
        train_alone(Measured(), spec())
    assert caught.value.phase == "evaluation"


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda i, x, y: {"x": x.repeat(1 + i % 2), "y": y}, "equal size"),
        (lambda i, x, y: {"x": x, "y": y, "extra": None if i % 2 else y}, "None"),
        (lambda i, x, y: {"x": x, "y": y, "thing": object()}, "object"),
    ],
)
def test_samples_that_do_not_stack_are_refused_before_the_first_step(make: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=f"task.collate: .*{text}.* Define collate"):
        train_alone(Program(make=make), spec())


@pytest.mark.parametrize("name", ["a collator that draws", "ragged sequences", "strings, None and arrays"])
def test_loader_processes_change_no_bit(name: str) -> None:
    alone = train_alone(PROGRAMS[name], spec())
    loaded = train_alone(PROGRAMS[name], spec(workers=2, prefetch=4))
    assert [(r.loss, r.grad_norm, r.metrics) for r in loaded] == [
        (r.loss, r.grad_norm, r.metrics) for r in alone
    ]


def test_loader_processes_may_be_added_and_left_out_on_the_way(pool: GlooPool) -> None:
    task = PROGRAMS["a collator that draws"]
    expected = list({r.step: r.loss for r in train_alone(task, spec())}.values())
    gang = Gang(pool, task, spec(workers=1))
    gang.form(gang.plan(2, 1))
    reports = gang.pause_at(3)
    gang.form(gang.plan(1, 1), origin=gang.held())
    reports += gang.run()
    losses = list({r.step: r.loss for r in reports}.values())
    np.testing.assert_allclose(losses, expected, rtol=1e-12)


def columns() -> list[torch.Tensor]:
    """Pieces of three columns of text, one after the other; the last piece of each is shorter."""
    return [torch.ones(5 if number < 6 else 2) for number in range(9)]


def recurs(ctx: Any) -> None:
    net = ctx.model("net", lambda: nn.Linear(1, 1))
    ctx.optimizer("sgd", torch.optim.SGD, net, lr=0.1)
    for batch in ctx.batches(columns):
        with ctx.step() as step:
            for pieces in batch:
                step.backward(net(pieces.unsqueeze(-1)).square().mean())


def test_samples_that_are_never_together_may_differ_in_shape_where_nothing_is_shuffled() -> None:
    sizes = {"global_size": 3, "micro_size": 3}
    assert len(train_alone(LoopTask(recurs), spec(**sizes, shuffle=False))) == 6
    with pytest.raises(ConfigError, match=r"cannot be stacked"):
        train_alone(LoopTask(recurs), spec(**sizes))


def test_a_task_that_does_not_pickle_is_refused_where_processes_load() -> None:
    task = Program(combine=lambda samples: samples)
    with pytest.raises(ConfigError, match=r"does not pickle.* workers=0"):
        train_alone(task, spec(workers=1))
