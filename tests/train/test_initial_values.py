"""The state before step 1 is what the job's own code makes in one process, under every plan."""

from __future__ import annotations

import copy
import os
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
    """Trains what a function of this file builds."""

    build: str

    def model(self) -> nn.Module:
        return globals()[self.build]()

    def optimizer(self, named_params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for _, p in named_params], lr=0.1)

    def dataset(self) -> Squares:
        return Squares()

    def loss(self, output: torch.Tensor, micro_batch: torch.Tensor) -> Any:
        return output.square().sum(), len(micro_batch)


# -- models ------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 7), nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).tanh())


class SetInConstructor(Net):
    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.last.weight)
        nn.init.constant_(self.last.bias, -4.6)


class Applied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.apply(self._init)
        for name, parameter in self.named_parameters():
            if name.endswith("first.weight"):
                nn.init.normal_(parameter, std=0.02 / 2**0.5)

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)


class Loaded(Net):
    def __init__(self) -> None:
        super().__init__()
        self.load_state_dict(
            {name: torch.full(tuple(v.shape), 0.25) for name, v in self.state_dict().items()}
        )


class ParentsFirst(Net):
    """The parent writes before the child is there, and the child draws last."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.first.weight.mul_(3.0)
        self.head = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(super().forward(x))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attend(x[:, None], x[:, None], x[:, None], need_weights=False)[0]


class Masks(nn.Linear):
    """Buffers of dtypes that have no mark for what is not written, and others."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.register_buffer("keep", torch.arange(6) < 4)
        self.register_buffer("bytes", (torch.arange(6) % 2).to(torch.uint8))
        self.register_buffer("order", torch.randperm(6), persistent=False)
        self.register_buffer("scale", torch.rand(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x[:, self.order] * self.keep * self.bytes * self.scale)


class OnTheHost(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(6, 6)
        with torch.device("cpu"):
            self.net = Net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(self.before(x))


class FromNumpy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.from_numpy(np.random.randn(6, 3).astype(np.float32)))
        self.bias = nn.Parameter(torch.tensor([random.random() for _ in range(3)]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


class Items(Net):
    """Needs values while it is built, and draws from the host's generator what only its forward sees."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
        self.factor = torch.rand(1).item()
        self.shift = torch.rand(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward((x + self.shift.to(x.dtype)) * self.factor + sum(self.rates))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        nn.init.eye_(self.head.weight)
        self.head.weight = self.embed.weight
        nn.init.orthogonal_(self.embed.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.frozen(self.embed(x)))


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        torch.nn.utils.parametrizations.weight_norm(self.first)
        self.norm = nn.BatchNorm1d(3)
        nn.init.zeros_(self.norm.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(super().forward(x))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(1, 5, 2, batch_first=True)
        for name, parameter in self.cells.named_parameters():
            if "bias" in name:
                nn.init.ones_(parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cells(x[:, :, None])[0]


class LeftEmpty(nn.Module):
    """A constructor that leaves a tensor to `reset_parameters`, which nobody called."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.empty(6))

    def reset_parameters(self) -> None:
        nn.init.constant_(self.scale, 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale


class Unseeded(Net):
    def __init__(self) -> None:
        super().__init__()
        nn.init.constant_(self.last.bias, int.from_bytes(os.urandom(3)))


class Changing(Net):
    """Has other sizes each time it is built."""

    number = 0

    def __init__(self) -> None:
        super().__init__()
        Changing.number += 1
        self.more = nn.Linear(3, Changing.number)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.more(super().forward(x))


PLAIN = [SetInConstructor, Applied, Loaded, ParentsFirst, Attention, Masks, OnTheHost, FromNumpy, Items]
PLAIN += [Tied, Normed, Recurrent]


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
