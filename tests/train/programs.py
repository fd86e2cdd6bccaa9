"""How a program of a user is held to a plain loop: what both are, and what equal means."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from elastic_train.checkpoint.document import decode, encode
from elastic_train.config import Batch, RunSpec
from elastic_train.data.order import SampleOrder
from elastic_train.testing.gang import Gang
from elastic_train.testing.gang_member import call
from elastic_train.testing.gloo_pool import GlooPool, PoolError
from elastic_train.train.declaration.loop_task import LoopTask, task_of
from elastic_train.train.model.collate import caller, collate
from elastic_train.train.model.plain_build import default_dtype
from elastic_train.train.model.rng import Randomness, derive, seed_all
from elastic_train.train.model.several_models import Models
from elastic_train.train.model.tensor_names import canonical
from elastic_train.train.task import Task

SEED, STEPS, SAMPLES = 3, 6, 24
RTOL = 1e-12

Move = tuple[tuple[int, int], tuple[int, ...], int]
"""A mesh (dp_replicate, dp_shard), the processes that take it, and the step up to which they train."""

WAYS: dict[str, Sequence[Move]] = {
    "dp1": [((1, 1), (0,), 6)],
    "dp2": [((2, 1), (0, 1), 6)],
    "fsdp2": [((1, 2), (0, 1), 6)],
    "2-3-1": [((2, 1), (0, 1), 2), ((3, 1), (1, 0, 2), 4), ((1, 1), (3,), 6)],
    "resume": [((1, 1), (0,), 3), ((1, 1), (3,), 6)],
}
ALONE = ("dp1", "resume")


class Points(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = torch.randn(6, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
        return {"x": x, "y": x.sin().sum().view(1)}


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 7), nn.Linear(7, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Dropout(dropout)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        for block in self.blocks:
            h = h + block(h)
        return self.b(h)


class Fit(Task):
    """Least squares with AdamW. A program changes what it is about."""

    def model(self) -> nn.Module:
        return Net()

    def optimizer(self, named_params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for _, p in named_params], lr=1e-2)

    def dataset(self) -> Any:
        return Points()

    def inputs(self, micro_batch: Any) -> Any:
        return micro_batch["x"]

    def loss(self, output: Any, micro_batch: Any) -> Any:
        return (output - micro_batch["y"]).square().sum(), len(output)


def of_model(model: Any, name: str) -> type[Fit]:
    """A task of this model, by its name in the model's file."""

    class Given(Fit):
        def model(self) -> nn.Module:
            return model()

    Given.__name__ = Given.__qualname__ = name
    Given.__module__ = model.__module__
    return Given


@dataclass(frozen=True, kw_only=True)
class Program:
    """`make` is a task's class or a loop. `refused` is what the error says, on every way or on some; None
    where it runs. `most` is the most workers that the run may have."""

    make: Any
    refused: str | None = None
    ways: tuple[str, ...] = tuple(WAYS)
    refused_on: dict[str, str] = field(default_factory=dict)
    most: int = 4
    rtol: float = RTOL

    @property
    def name(self) -> str:
        return self.make.__name__

    def task(self) -> Task:
        return task_of(self.make() if isinstance(self.make, type) else self.make)


@dataclass(kw_only=True)
class Outcome:
    losses: list[float] = field(default_factory=list[float])
    norms: list[float] = field(default_factory=list[float])
    weights: dict[str, np.ndarray] = field(default_factory=dict[str, np.ndarray])


def spec(most: int) -> RunSpec:
    return RunSpec(
        name="program",
        storage_path="/nowhere",
        batch=Batch(global_size=8, micro_size=2, seed=SEED),
        max_steps=STEPS,
        min_workers=1,
        max_workers=most,
        precision="fp64",
    )


def hold(program: Program, way: str, pool: GlooPool) -> None:
    """The program on a way is equal to its plain loop, or is refused there before its first step."""
    refused = program.refused or program.refused_on.get(way)
    gang = Gang(pool, program.task(), spec(program.most))
    if refused is not None:
        with pytest_raises(refused):
            found = _trained(gang, WAYS[way], pool)
            raise AssertionError(f"it trained: {found.losses}")
        return
    expected, found = plain(program), _trained(gang, WAYS[way], pool)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=program.rtol, err_msg="losses")
    np.testing.assert_allclose(found.norms, expected.norms, rtol=1e3 * program.rtol, err_msg="norms")
    assert found.weights.keys() >= expected.weights.keys()  # what a loop registers is beside them
    for name, value in expected.weights.items():
        np.testing.assert_allclose(
            found.weights[name], value, rtol=1e3 * program.rtol, atol=1e3 * program.rtol, err_msg=name
        )


@contextmanager
def pytest_raises(pattern: str) -> Iterator[None]:
    """A ConfigError with this text, before any step was committed."""
    try:
        yield
    except (PoolError, AssertionError) as error:
        text = str(error)
        assert "ConfigError" in text, text
        assert re.search(pattern, text), f"{pattern!r} is not in {text}"
        assert not re.search("it trained", text), text
        return
    raise AssertionError("nothing was raised")


def _trained(gang: Gang, way: Sequence[Move], pool: GlooPool) -> Outcome:
    outcome, origin = Outcome(), None
    for (replicate, shard), processes, stop in way:
        gang.form(gang.plan(replicate, shard), processes, origin)
        reports = gang.run() if stop == STEPS else gang.pause_at(stop)
        steps = {report.step: report for report in reports}.values()  # one with metrics is told again
        outcome.losses += [report.loss for report in steps]
        outcome.norms += [report.grad_norm for report in steps]
        origin = gang.held()
        (document,) = pool.run(call, "document", gang.generation, ranks=processes[:1])
        assert decode(encode(document), url="") == document
    whole = gang.whole()
    outcome.weights = {fqn: value for (fqn, state), value in whole.items() if state in ("param", "buffer")}
    return outcome


# -- plain loops -------------------------------------------------------------------------------------------


def plain(program: Program) -> Outcome:
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    made = program.task()
    return PlainContext().trained(made.loop) if isinstance(made, LoopTask) else _plain_task(made)


def _plain_task(task: Task) -> Outcome:
    with default_dtype(torch.float64):
        model = task.model()
    optimizer = task.optimizer(list(model.named_parameters()))
    schedule = task.schedule(optimizer)
    data, call, randomness = task.dataset(), caller(model), Randomness(model, seed=SEED)
    order, outcome = SampleOrder(SAMPLES, spec(1).batch), Outcome()
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        total = count = 0.0
        for micro in order.micro_batches(step):
            batch = collate([data[i] for i in micro.ids], torch.device("cpu"), torch.float64)
            with randomness.micro_batch(step, micro.index):
                loss, counted = task.loss(call(task.inputs(batch)), batch)
                (loss / 8).backward()
            total, count = total + float(loss.detach()), count + float(counted)
        outcome.norms.append(_mean_gradient(model.parameters(), 8 / count))
        outcome.losses.append(total / count)
        optimizer.step()
        if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
            schedule.step(total / count)
        elif schedule is not None:
            schedule.step()
    outcome.weights = _weights(model)
    return outcome


def _mean_gradient(parameters: Any, factor: float) -> float:
    gradients = [p.grad for p in parameters if p.grad is not None]
    for gradient in gradients:
        gradient.mul_(factor)
    return float(torch.stack([g.square().sum() for g in gradients]).sum().sqrt()) if gradients else 0.0


def _weights(model: nn.Module) -> dict[str, np.ndarray]:
    whole = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    found = {
        name: (value.float() if value.dtype == torch.bfloat16 else value).detach().numpy()
        for name, value in whole.items()
    }
    return {canonical(name): value for name, value in found.items() if value.size}


class PlainRows:
    """State of the places of a batch of eight, in micro-batches of two."""

    def __init__(self, value: torch.Tensor, dim: int) -> None:
        self.value, self.place, self._dim = value, 0, dim
        self._next = value

    def get(self) -> torch.Tensor:
        return self.value.narrow(self._dim, self.place, 2).clone()

    def set(self, rows: torch.Tensor) -> None:
        if self._next is self.value:
            self._next = self.value.clone()
        self._next.narrow(self._dim, self.place, 2).copy_(rows.detach())

    def step(self) -> None:
        self.value = self._next


class PlainStep:
    """The gradient of a mean over the global batch, in one process."""

    def __init__(self, context: PlainContext) -> None:
        self._context = context
        self._losses: list[torch.Tensor] = []
        self._first: list[torch.Tensor] = []  # of a closure, told where nothing follows it
        self.loss = 0.0

    def backward(self, loss: torch.Tensor, count: Any = None, *, retain_graph: bool = False) -> None:
        assert count is None
        (loss * 2 / 8).backward(retain_graph=retain_graph)
        self._losses.append(loss.detach() * 2)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        self._context.updated.append(optimizer)
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for parameter in self._context.models.parameters():
            if id(parameter) not in mine:
                parameter.grad = None
        optimizer.step()
        for parameter in self._context.models.parameters():
            parameter.grad = None
        self._losses = []

    def closure(self, optimizer: torch.optim.Optimizer, compute: Callable[[], object]) -> None:
        self._context.updated.append(optimizer)
        firsts: list[list[torch.Tensor]] = []

        def evaluated() -> torch.Tensor:
            optimizer.zero_grad()
            self._losses = []
            compute()
            firsts.append(self._losses)
            return torch.stack(self._losses).sum() / 8

        optimizer.step(evaluated)  # type: ignore[arg-type]
        self._losses, self._first = [], firsts[0]
        for parameter in self._context.models.parameters():
            parameter.grad = None

    def end(self) -> None:
        context = self._context
        self.loss = float(torch.stack(self._losses or self._first).sum()) / 8
        context.outcome.losses.append(self.loss)
        updated = {id(p) for o in context.updated for group in o.param_groups for p in group["params"]}
        due = [p for p in context.models.parameters() if id(p) not in updated]
        context.outcome.norms.append(_mean_gradient(due, 1.0))
        self.grad_norm = context.outcome.norms[-1]
        for rows in context.carried:
            rows.step()
        for optimizer in context.optimizers:
            if optimizer not in context.updated:
                optimizer.step()
        context.updated.clear()


class PlainBatch:
    def __init__(self, context: PlainContext, data: Any, step: int, order: SampleOrder) -> None:
        self.step, self.epoch, self.steps_per_epoch = step, (step - 1) // 3, 3
        self._context, self._data, self._order, self._passes = context, data, order, 0

    def __iter__(self) -> Iterator[Any]:
        micro_batches = self._order.micro_batches(self.step)
        number, self._passes = self._passes, self._passes + 1
        for micro in micro_batches:
            batch = collate([self._data[i] for i in micro.ids], torch.device("cpu"), torch.float64)
            index = micro.index + number * len(micro_batches)
            for rows in self._context.carried:
                rows.place = 2 * micro.index
            with self._context.randomness.micro_batch(self.step, index):
                yield batch


class PlainContext:
    """What a loop is given, as a script of one process would have it."""

    rank, world_size, device, max_steps = 0, 1, torch.device("cpu"), STEPS

    def __init__(self) -> None:
        self.models, self.at = Models(), 0
        self.optimizers: list[torch.optim.Optimizer] = []
        self.updated: list[torch.optim.Optimizer] = []
        self.carried: list[PlainRows] = []
        self.outcome = Outcome()

    def trained(self, loop: Callable[[Any], object]) -> Outcome:
        loop(self)
        self.outcome.weights = _weights(self.models)
        return self.outcome

    def model(self, name: str, build: Callable[[], nn.Module], *, init: Any = None) -> nn.Module:
        with default_dtype(torch.float64):
            self.models.add_module(name, build())
        return getattr(self.models, name)

    def optimizer(self, name: str, make: Any, model: Any, **settings: Any) -> Any:
        made = make(list(model.parameters()) if isinstance(model, nn.Module) else model, **settings)
        self.optimizers.append(made)
        return made

    def register(self, name: str, thing: Any) -> Any:
        return thing

    def carry(self, name: str, value: torch.Tensor, *, dim: int = 0) -> PlainRows:
        self.carried.append(PlainRows(value, dim))
        return self.carried[-1]

    def batches(self, dataset: Any) -> Iterator[PlainBatch]:
        self.randomness = Randomness(self.models, seed=SEED)
        data = dataset() if isinstance(dataset, type) else dataset
        order = SampleOrder(SAMPLES, spec(1).batch)
        for step in range(1, STEPS + 1):
            self.models.zero_grad()
            seed_all(derive(SEED, "loop", step))  # what is drawn beside micro-batches is the step's
            yield PlainBatch(self, data, step, order)

    @contextmanager
    def step(self, metrics: tuple[str, ...] = ()) -> Iterator[PlainStep]:
        step = PlainStep(self)
        yield step
        step.end()
        self.at += 1

    def report(self, **metrics: float) -> None:
        return None
