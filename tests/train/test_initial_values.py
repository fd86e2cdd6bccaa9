"""The state before step 1 is what the job's own code makes in one process, under every plan."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from elastic_train.checkpoint.engine import machine_memory
from elastic_train.config import Batch, RunSpec
from elastic_train.testing.gang import Gang
from elastic_train.testing.gloo_pool import GlooPool, PoolError
from elastic_train.train.declaration.loop_task import task_of
from elastic_train.train.model.plain_build import default_dtype
from elastic_train.train.task import Task
from tests.train import models_by_init
from tests.train.models_by_init import PLAIN, Applied, LeftEmpty, Net, SetInConstructor

pytestmark = pytest.mark.ring2

SEED = 7
MESHES = [(1, 1), (2, 1), (1, 2)]


def spec(**changes: Any) -> RunSpec:
    return RunSpec(
        **{
            "name": "initial",
            "storage_path": "/nowhere",
            "batch": Batch(global_size=4, micro_size=2, seed=SEED),
            "max_steps": 1,
            "min_workers": 1,
            "max_workers": 4,
            "precision": "fp32",
            **changes,
        }
    )


class Squares(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(6, generator=torch.Generator().manual_seed(index), dtype=torch.float64)


@dataclass
class Builds(Task):
    """Trains a model of `models_by_init`."""

    build: str

    def model(self) -> nn.Module:
        return getattr(models_by_init, self.build)()

    def optimizer(self, named_params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for _, p in named_params], lr=0.1)

    def dataset(self) -> Squares:
        return Squares()

    def loss(self, output: torch.Tensor, micro_batch: torch.Tensor) -> Any:
        return output.square().sum(), len(micro_batch)


def plain(build: Callable[[], nn.Module], dtype: torch.dtype = torch.float32) -> nn.Module:
    """As a script makes it."""
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    with default_dtype(dtype):
        return build()


def assert_values(gang: Gang, model: nn.Module) -> None:
    found = gang.whole()
    expected = {(n, "param"): p.detach() for n, p in model.named_parameters()}
    expected |= {(n, "buffer"): b for n, b in model.named_buffers()}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert np.array_equal(found[name], value.numpy()), name


@pytest.mark.parametrize("build", PLAIN, ids=lambda build: build.__name__)
def test_values_are_those_of_a_plain_build(pool: GlooPool, build: type[nn.Module]) -> None:
    model = plain(build)
    gang = Gang(pool, Builds(build.__name__), spec())
    for mesh in MESHES:
        gang.form(gang.plan(*mesh))
        assert_values(gang, model)
        data = torch.stack([Squares()[i] for i in range(12)]).float()
        if mesh == (1, 1):
            (report,) = gang.run()
            ids = pool.run(first_ids, ranks=[0])[0]
            apart = copy.deepcopy(model).train()  # statistics of a batch norm are those of a micro-batch
            expected = (
                sum(float(apart(data[two]).detach().double().square().sum()) for two in (ids[:2], ids[2:]))
                / 4
            )
            assert report.loss == pytest.approx(expected, rel=1e-6)


def first_ids(state: dict[str, Any]) -> list[int]:
    order = state["member"]._dataset().order
    return [i for micro in order.micro_batches(1) for i in micro.ids]


def test_the_dtype_is_that_of_the_run(pool: GlooPool) -> None:
    gang = Gang(pool, Builds("Applied"), spec(precision="fp64"))
    gang.form(gang.plan(2, 1))
    assert_values(gang, plain(Applied, torch.float64))


def two_models(ctx: Any) -> None:
    one = ctx.model("one", Applied)
    torch.randn(3)  # of the loop's own
    two = ctx.model("two", SetInConstructor)
    ctx.model("three", lambda: LeftEmpty(), init=lambda module, fqn: fill(module))
    ctx.optimizer("sgd", torch.optim.SGD, [*one.parameters(), *two.parameters()], lr=0.1)
    for batch in ctx.batches(Squares):
        with ctx.step() as step:
            for micro in batch:
                step.backward(two(micro).square().mean() + one(micro).square().mean())


def fill(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.constant_(parameter, 3.0)


def test_models_of_a_loop_are_built_one_after_the_other(pool: GlooPool) -> None:
    def built() -> nn.Module:
        models = nn.ModuleDict({"one": Applied()})
        torch.randn(3)
        models["two"], models["three"] = SetInConstructor(), LeftEmpty()
        models["three"].apply(fill)
        return models

    expected = plain(built)
    gang = Gang(pool, task_of(two_models), spec())
    for mesh in MESHES:
        gang.form(gang.plan(*mesh))
        assert_values(gang, expected)


def test_what_a_constructor_leaves_empty_is_reset_by_its_module(pool: GlooPool) -> None:
    gang = Gang(pool, Builds("LeftEmpty"), spec())
    for mesh in MESHES:
        gang.form(gang.plan(*mesh))
        found = gang.whole()
        assert np.array_equal(found["scale", "param"], np.full(6, 0.5, np.float32))
        assert np.array_equal(found["inner.weight", "param"], plain(LeftEmpty).inner.weight.detach().numpy())


def test_values_from_nowhere_are_refused_by_name(pool: GlooPool) -> None:
    gang = Gang(pool, Builds("Unseeded"), spec())
    gang.form(gang.plan(1, 1))
    with pytest.raises(
        PoolError, match=r"task.model: gives 'last.bias' other values on each rank\. Draw them"
    ):
        gang.form(gang.plan(2, 1))


def test_a_model_that_is_another_one_each_time_is_refused(pool: GlooPool) -> None:
    gang = Gang(pool, Builds("Changing"), spec())
    with pytest.raises(PoolError, match=r"another model each time it is called: 'more\.(bias|weight)' was"):
        gang.form(gang.plan(1, 1))


def leave_no_room(state: dict[str, Any]) -> None:
    from elastic_train.train.state import initial_values as initial

    plain = initial.memory_room
    initial.memory_room = lambda: 100
    state["undo"] = lambda: setattr(initial, "memory_room", plain)


def initialise(state: dict[str, Any]) -> tuple[str, ...]:
    return state["member"].forming.initialise()


def test_without_room_on_one_node_all_initialise_module_by_module_and_say_so(pool: GlooPool) -> None:
    assert machine_memory.memory_room() >= machine_memory.free_memory()
    gang = Gang(pool, Builds("Net"), spec())
    gang.join(gang.plan(2, 1), (0, 1))
    pool.run(leave_no_room, ranks=[1])
    (note,), other = pool.run(initialise, ranks=[0, 1])
    assert note.startswith("initial values: 1 copies of a model of 292.0 B take too much of a node's memory")
    assert other
    pool.run(go, ranks=[0, 1])
    found = gang.whole()
    assert not np.array_equal(found["first.weight", "param"], plain(Net).first.weight.detach().numpy())


@pytest.mark.parametrize("by_module", [True, False])
def test_a_run_that_begins_again_elsewhere_chooses_its_initial_values_as_before(
    pool: GlooPool, by_module: bool
) -> None:
    gang = Gang(pool, Builds("Net"), spec())
    gang.join(gang.plan(2, 1), (0, 1), by_module)
    if not by_module:
        pool.run(leave_no_room, ranks=[0, 1])
    assert pool.run(initialise, ranks=[0, 1]) == [(), ()]
    pool.run(go, ranks=[0, 1])
    same = np.array_equal(gang.whole()["first.weight", "param"], plain(Net).first.weight.detach().numpy())
    assert same is not by_module


def go(state: dict[str, Any]) -> None:
    state["member"].forming.digest()
    state["member"].go()
