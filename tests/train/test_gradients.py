"""A task edits the reduced gradient: the same numbers under every plan, and after every failure."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from elastic_train.errors import ConfigError, UserCodeError
from elastic_train.planner.plan import Mesh
from elastic_train.testing.gang import From, Gang
from elastic_train.testing.gang_member import has_come_to
from elastic_train.testing.gloo_pool import GlooPool
from elastic_train.testing.reference import assert_state_near, reference
from elastic_train.testing.single_process_run import train_alone
from elastic_train.train.model import seeded_sections
from elastic_train.train.step.gradients import Gradients
from elastic_train.train.task import Task
from tests.tasks.chain import ChainTask
from tests.tasks.tiny import TinyTask
from tests.train.equality import SPLITS, spec
from tests.train.test_failures import is_settled, lose_answer_of

pytestmark = pytest.mark.ring2

Plain = Callable[[Mapping[str, nn.Parameter], int], None]


def chosen(named: Mapping[str, nn.Parameter], pattern: str) -> list[nn.Parameter]:
    return [p for n, p in named.items() if p.grad is not None and fnmatch.fnmatchcase(n, pattern)]


def clip_value(gradients: Gradients) -> None:
    gradients.clip_value_(1e-2)


def plain_clip_value(named: Mapping[str, nn.Parameter], step: int) -> None:
    nn.utils.clip_grad_value_(named.values(), 1e-2)


def by_group(gradients: Gradients) -> None:
    gradients.clip_norm_(0.05, "*norm*")
    gradients.clip_norm_(0.1 / gradients.step, "layers.*.attention.*")
    gradients.scale_(0.5, "layers.3.*")


def plain_by_group(named: Mapping[str, nn.Parameter], step: int) -> None:
    nn.utils.clip_grad_norm_(chosen(named, "*norm*"), 0.05)
    nn.utils.clip_grad_norm_(chosen(named, "layers.*.attention.*"), 0.1 / step)
    for parameter in chosen(named, "layers.3.*"):
        parameter.grad *= 0.5


def noise(gradients: Gradients) -> None:
    gradients.add_noise_(1e-2 / gradients.step)


def plain_noise(named: Mapping[str, nn.Parameter], step: int) -> None:
    for fqn, parameter in named.items():
        if parameter.grad is not None:
            with seeded_sections.gradient(11, step, fqn, torch.device("cpu")):
                parameter.grad += torch.randn_like(parameter) * (1e-2 / step)


def centred(fqn: str, gradient: Tensor) -> Tensor | None:
    """Gradient centralisation: it needs whole rows and columns."""
    return gradient - gradient.mean() if gradient.ndim > 1 else gradient.clamp_(max=gradient.abs().median())


def whole_tensors(gradients: Gradients) -> None:
    gradients.edit_(centred)


def plain_whole_tensors(named: Mapping[str, nn.Parameter], step: int) -> None:
    for fqn, parameter in named.items():
        if parameter.grad is not None:
            parameter.grad = centred(fqn, parameter.grad)


EDITS: dict[str, tuple[Callable[[Gradients], None], Plain]] = {
    "clip by value": (clip_value, plain_clip_value),
    "clip by group": (by_group, plain_by_group),
    "noise": (noise, plain_noise),
    "whole tensors": (whole_tensors, plain_whole_tensors),
}
MESHES = [
    Mesh(dp_replicate=3),
    Mesh(dp_shard=2, tp=2),
    Mesh(dp_replicate=2, dp_shard=2),
    Mesh(pp=2, dp_shard=2),
]


@dataclass
class Editing(ChainTask):
    edit: str = ""

    def gradients(self, gradients: Gradients) -> None:
        EDITS[self.edit][0](gradients)


@pytest.mark.parametrize("name", EDITS)
def test_edits_are_those_of_a_plain_loop_under_every_plan(pool: GlooPool, name: str) -> None:
    task, run = Editing(edit=name), spec()
    gang = Gang(pool, task, run)
    gang.form(gang.plan(1, 1))
    expected = reference(task, run, gang.whole(), EDITS[name][1])
    for mesh in [Mesh(), *MESHES]:
        gang.form(gang.plan_on(mesh, stages=SPLITS[mesh.pp]))
        reports = gang.run()
        np.testing.assert_allclose([r.loss for r in reports], expected.losses, rtol=1e-9, err_msg=str(mesh))
        np.testing.assert_allclose([r.grad_norm for r in reports], expected.norms, rtol=1e-9)
        assert_state_near(gang.whole(), expected.state)


def test_experts_are_edited_whole_wherever_they_are(pool: GlooPool) -> None:
    task, run = Editing(edit="whole tensors", experts=4, hidden=20), spec()
    gang = Gang(pool, task, run)
    gang.form(gang.plan(1, 1))
    expected = reference(task, run, gang.whole(), plain_whole_tensors)
    for mesh in (Mesh(dp_shard=2, ep=2), Mesh(dp_shard=4, ep=2)):
        gang.form(gang.plan_on(mesh))
        gang.run()
        assert_state_near(gang.whole(), expected.state)


class Noisy(TinyTask):
    def gradients(self, gradients: Gradients) -> None:
        noise(gradients)


def test_a_laggard_applies_the_edited_gradient(pool: GlooPool) -> None:
    gang = Gang(pool, Noisy(), spec(precision="fp32", max_steps=6, compare_replicas=None))
    plan = gang.plan(2, 1)
    gang.form(plan)
    expected, state = [r.loss for r in gang.run()], gang.whole()
    gang.form(plan)
    pool.run(lose_answer_of, 4, ranks=[1])
    running = gang.begin()
    gang.wait_for([1], is_settled, 3)
    gang.wait_for([0], has_come_to, "forward", 5)
    gang.abort()
    reports = running.results()[0][2]
    (vote,) = [h.applied for h in gang.local_states() if h.rank == 0]
    gang.form(plan, None, From(generation=gang.generation, step=4, holders=gang.processes, vote=vote))
    assert [r.loss for r in reports + gang.run()] == expected
    assert all(np.array_equal(value, state[name]) for name, value in gang.whole().items())


def _with(edit: Callable[[Gradients], Any]) -> Task:
    class Edited(TinyTask):
        def gradients(self, gradients: Gradients) -> None:
            edit(gradients)

    return Edited()


def test_what_cannot_be_edited_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"no trained parameter matches 'frozen\.\*'"):
        train_alone(_with(lambda g: g.scale_(2.0, "frozen.*")), spec())
    with pytest.raises(ConfigError, match=r"gradient of 'embed\.weight' has shape \(1,\)"):
        train_alone(_with(lambda g: g.edit_(lambda fqn, t: torch.zeros(1))), spec())
    with pytest.raises(ConfigError, match="optimizer_in_backward: the task edits gradients"):
        train_alone(Noisy(), spec(optimizer_in_backward=True, clip_norm=None))
    with pytest.raises(UserCodeError, match="ZeroDivisionError") as caught:
        train_alone(_with(lambda g: g.scale_(1 / 0)), spec())
    assert caught.value.phase == "gradients"


def test_an_edit_that_is_not_finite_skips_the_step() -> None:
    reports = train_alone(_with(lambda g: g.scale_(float("nan") if g.step == 2 else 1.0)), spec())
    assert [r.skipped for r in reports] == [False, True, False]
