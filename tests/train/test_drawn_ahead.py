"""What a process builds of the next group's model while it waits is what that group trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from elastic_train.config import Batch, RunSpec
from elastic_train.planner.plan import Mesh
from elastic_train.testing.gang import Gang
from elastic_train.testing.gang_member import call
from elastic_train.testing.gloo_pool import GlooPool
from elastic_train.train.declaration.loop_task import LoopTask
from elastic_train.train.drawn_ahead import DrawnAhead
from elastic_train.train.task import Task
from tests.train.programs import Fit, Net

State = dict[str, Any]
SPEC = RunSpec(
    name="drawn",
    storage_path="/nowhere",
    batch=Batch(global_size=12, micro_size=2, seed=5),
    max_steps=8,
    min_workers=1,
    max_workers=3,
    precision="fp64",
)


class Counted(Fit):
    """Counts its models, and keeps the last one as jobs do."""

    built = 0

    def model(self) -> Any:
        type(self).built += 1
        self.last = Net(0.3)
        return self.last


class Valued(Fit):
    def model(self) -> Any:
        model = Net(0.3)
        assert sum(p.sum().item() for p in model.parameters()) != 0.0
        return model


class Wrong(Fit):
    def model(self) -> Any:
        raise OSError("there is no such file")


def walks(ctx: Any) -> None:
    raise AssertionError("a loop is not run for its models alone")


def draw(state: State) -> int:
    """How many models were built so far, once one is drawn ahead; twice does no harm."""
    for _ in range(2):
        state["member"].drawn_ahead.draw()
    return Counted.built


def built(state: State) -> tuple[int, bool]:
    member = state["member"]
    return Counted.built, member.held.current.model is member._task.last


@pytest.mark.ring2
@pytest.mark.parametrize("mesh", [Mesh(dp_replicate=2), Mesh(dp_shard=2)], ids=str)
def test_a_group_trains_what_was_drawn_ahead_and_draws_no_other(pool: GlooPool, mesh: Mesh) -> None:
    alone = Gang(pool, Counted(), SPEC)
    alone.form(alone.plan(1, 1))
    expected = [r.loss for r in alone.run()]
    gang = Gang(pool, Counted(), SPEC)
    gang.form(gang.plan(2, 1), [0, 1])
    losses = [r.loss for r in gang.pause_at(4)]
    origin = gang.held()
    before = pool.run(draw, ranks=[0, 1])
    gang.form(gang.plan_on(mesh), [0, 1], origin)
    assert pool.run(built, ranks=[0, 1]) == [(number, True) for number in before]
    losses += [r.loss for r in gang.run()]
    assert losses == pytest.approx(expected, rel=1e-9)
    pool.run(call, "close", ranks=[0, 1])


@pytest.mark.ring1
@pytest.mark.parametrize("task", [Valued(), Wrong(), LoopTask(walks)], ids=lambda task: type(task).__name__)
def test_a_loop_or_a_model_that_needs_values_or_fails_is_left_to_who_joins(task: Task) -> None:
    ahead = DrawnAhead(task, SPEC)
    ahead.draw()
    assert ahead.take() is None


@pytest.mark.ring1
def test_a_model_is_given_once_and_has_no_memory() -> None:
    ahead = DrawnAhead(Counted(), SPEC)
    ahead.draw()
    drawn = ahead.take()
    assert drawn is not None
    assert isinstance(drawn.model, nn.Module)
    assert all(p.is_meta for p in drawn.model.parameters())
    assert ahead.take() is None
    assert torch.get_default_dtype() is torch.float32
