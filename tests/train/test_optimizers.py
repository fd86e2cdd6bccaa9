"""Optimizers on shards do what they do on whole tensors, or are refused by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from elastic_train.config import RunSpec
from elastic_train.data.order import SampleOrder
from elastic_train.testing.gang import Gang
from elastic_train.testing.gloo_pool import GlooPool, PoolError
from tests.tasks.tiny import TinyData, TinyTask, tiny_run

pytestmark = pytest.mark.ring2


def spec(**changes: Any) -> RunSpec:
    return tiny_run(12, **{"max_steps": 6, **changes})


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        ("Adagrad", {"lr": 0.05, "initial_accumulator_value": 0.1}),
        ("RMSprop", {"lr": 0.01, "momentum": 0.5, "centered": True}),
        ("AdamW", {"lr": 0.02, "amsgrad": True, "fused": True}),
        ("NAdam", {"lr": 0.02, "foreach": True}),
    ],
)
def test_an_optimizer_moves_between_whole_and_sharded_parameters(
    pool: GlooPool, name: str, settings: dict[str, Any]
) -> None:
    gang = Gang(pool, TinyTask(optimizer_name=name, settings=settings), spec())
    gang.form(gang.plan(1, 1))
    expected, state = [r.loss for r in gang.run()], gang.whole()
    gang.form(gang.plan(1, 3))
    losses = [r.loss for r in gang.pause_at(2)]
    gang.form(gang.plan(2, 1), [1, 0], gang.held())
    losses += [r.loss for r in gang.pause_at(4)]
    gang.form(gang.plan(1, 2), None, gang.held())
    losses += [r.loss for r in gang.run()]
    np.testing.assert_allclose(losses, expected, rtol=1e-9)
    final = gang.whole()
    assert final.keys() == state.keys()
    for key in state:
        np.testing.assert_allclose(final[key], state[key], rtol=1e-9, atol=1e-12, err_msg=str(key))


class Signs(torch.optim.Optimizer):
    """Divides by the norm of the local tensor: right on whole tensors, wrong on shards."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    local = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
                    mine = p.to_local() if hasattr(p, "to_local") else p
                    mine.sub_(local / (local.norm() + 1e-6), alpha=group["lr"])


class Choice(TinyTask):
    """Any optimizer over all parameters."""

    def optimizer(self, named_params: Any) -> torch.optim.Optimizer:
        parameters = [p for _, p in named_params if self.optimizer_name != "Muon" or p.ndim == 2]
        if self.optimizer_name == "Signs":
            return Signs(parameters, lr=0.01)
        return getattr(torch.optim, self.optimizer_name)(parameters, **self.settings)


@pytest.mark.parametrize("name", ["Signs", "Adafactor", "Muon"])
def test_an_optimizer_that_needs_whole_tensors_is_refused_by_name_where_they_are_sharded(
    pool: GlooPool, name: str
) -> None:
    gang = Gang(pool, Choice(optimizer_name=name, settings={"lr": 0.01}), spec())
    gang.form(gang.plan(2, 1))
    gang.run()
    with pytest.raises(PoolError) as refused:
        gang.form(gang.plan(1, 2))
    assert f"ConfigError: task.optimizer: {name} " in str(refused.value)
    assert "dp_shard=1" in str(refused.value)


def test_an_optimizer_that_calls_back_for_the_loss_is_refused(pool: GlooPool) -> None:
    gang = Gang(pool, Choice(optimizer_name="LBFGS"), spec())
    with pytest.raises(PoolError, match="LBFGS computes the loss several times"):
        gang.form(gang.plan(1, 1))


@dataclass
class Branching(TinyTask):
    """One layer runs only in micro-batches that hold a given sample."""

    tokens: tuple[int, ...] = ()

    def model(self) -> torch.nn.Module:
        return BranchingModel(super().model(), list(self.tokens))


class BranchingModel(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module, wanted: list[int]) -> None:
        super().__init__()
        self.inner, self.late, self.wanted = inner, torch.nn.Linear(6, 1), wanted

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.inner(tokens)
        if self.wanted in tokens.tolist():
            logits = logits + self.late(logits[..., :6]).square()
        return logits


def test_a_parameter_is_touched_only_once_some_rank_has_a_gradient_for_it(pool: GlooPool) -> None:
    run = spec(max_steps=4)
    sample = SampleOrder(TinyTask().samples, run.batch).micro_batches(2)[1].ids[0]
    tokens = TinyData(57)[sample]["tokens"].tolist()
    gang = Gang(pool, Branching(tokens=tuple(tokens)), run)
    runs = []
    for mesh in [(1, 1), (2, 1), (1, 3)]:
        gang.form(gang.plan(*mesh))
        with_state = []
        for step in range(1, 4):
            gang.pause_at(step)
            with_state.append(("late.weight", "exp_avg") in gang.whole())
            gang.form(gang.plan(*mesh), None, gang.held())
        gang.run()
        runs.append((with_state, gang.whole()))
    assert runs[0][0] == [False, True, True]
    for with_state, state in runs[1:]:
        assert with_state == runs[0][0]
        for key in state:
            np.testing.assert_allclose(state[key], runs[0][1][key], rtol=1e-9, atol=1e-12)
