"""A backward in two parts, and pipelines that run it: the same bits as a whole backward."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from elastic_train.config import Batch, RunSpec
from elastic_train.models.llama import Llama
from elastic_train.models.sizes import size
from elastic_train.planner.plan import Mesh
from elastic_train.testing.gang import Gang
from elastic_train.testing.gloo_pool import GlooPool
from elastic_train.testing.reference import assert_state_near, reference
from elastic_train.train.step.split_backward import backward_to_input
from tests.tasks.chain import ChainTask

pytestmark = pytest.mark.ring2

SPLITS = {2: ((0, 1), (1, 4)), 3: ((0, 2), (2, 4), (4, 4)), 4: ((0, 1), (1, 2), (2, 3), (3, 4))}


class Odd(nn.Module):
    """Places of a graph: a matrix that is used twice, two that meet, one that is not reached."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.first, self.second = (nn.Linear(8, 8) for _ in range(3))
        self.bilinear = nn.Parameter(torch.randn(8, 8))
        self.unused = nn.Linear(8, 8)
        self.scale = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.scale(self.twice(x).relu() + x)
        both = torch.cat([self.first.weight, self.second.weight]) @ x.mT
        return self.twice(x) * both.sum() + x @ (self.bilinear @ self.first.weight)


@pytest.mark.parametrize("kind", ["llama", "odd"])
def test_both_parts_make_the_gradients_of_a_whole_backward(kind: str) -> None:
    torch.manual_seed(0)
    model: nn.Module = Odd()
    if kind == "llama":
        model = Llama(size("nano", dropout=0.1))
        model._modules["embed"] = nn.Identity()  # a stage that is not the first
        model.layers[0].mlp.up.requires_grad_(False)  # type: ignore[union-attr]
    width = 8 if kind == "odd" else 32
    found: list[list[Tensor | None]] = []
    for split in (False, True):
        model.zero_grad()
        received: list[Tensor] = []
        for number in range(3):
            torch.manual_seed(number)
            x = torch.randn(2, 5, width, requires_grad=True)
            output = model(x)
            start = torch.randn_like(output)
            if split:
                postponed = backward_to_input(output, start, x, model.parameters())
                assert postponed.levels
                postponed.run()
                assert not postponed.came, "nothing is kept"
            else:
                output.backward(start)
            assert x.grad is not None
            received.append(x.grad)
        found.append([*received, *(None if p.grad is None else p.grad.clone() for p in model.parameters())])
    for whole, parts in zip(*found, strict=True):
        assert (whole is None) == (parts is None)
        assert whole is None or parts is None or torch.equal(whole, parts)


def spec(**changes: object) -> RunSpec:
    return RunSpec(
        **{
            "name": "chain",
            "storage_path": "/nowhere",
            "batch": Batch(global_size=13, micro_size=2, seed=11),
            "max_steps": 4,
            "min_workers": 1,
            "max_workers": 4,
            "precision": "fp64",
            "clip_norm": 2.0,
            **changes,
        }
    )


def losses(gang: Gang, mesh: Mesh, **changes: object) -> list[float]:
    gang.form(replace(gang.plan_on(mesh, stages=SPLITS[mesh.pp]), **changes))
    return [report.loss for report in gang.run()]


@pytest.mark.parametrize(
    "mesh",
    [
        Mesh(pp=4),
        pytest.param(Mesh(pp=2, dp_replicate=2), marks=pytest.mark.matrix),
        pytest.param(Mesh(pp=2, tp=2), marks=pytest.mark.matrix),
        pytest.param(Mesh(pp=2, cp=2), marks=pytest.mark.matrix),
        pytest.param(Mesh(pp=3), marks=pytest.mark.matrix),
    ],
    ids=str,
)
def test_pipelines_without_bubbles_have_the_bits_of_one_forward_one_backward(
    pool: GlooPool, mesh: Mesh
) -> None:
    task, run = ChainTask(), spec()
    gang = Gang(pool, task, run)
    gang.form(gang.plan(1, 1))
    expected = reference(task, run, gang.whole())
    plain = losses(gang, mesh)
    state = gang.whole()
    assert losses(gang, mesh, schedule="ZeroBubble") == plain
    split = gang.whole()
    assert all(np.array_equal(split[name], value) for name, value in state.items())
    np.testing.assert_allclose(plain, expected.losses, rtol=1e-9)
    assert_state_near(split, expected.state)


@pytest.mark.matrix
def test_updates_within_a_split_backward_are_those_after_the_vote(pool: GlooPool) -> None:
    found: list[list[float]] = []
    for inside in (False, True):
        gang = Gang(pool, ChainTask(), spec(clip_norm=None, optimizer_in_backward=inside))
        found.append(losses(gang, Mesh(pp=2, dp_replicate=2), schedule="ZeroBubble"))
    np.testing.assert_allclose(found[1], found[0], rtol=1e-9)
