"""Context of a user's loop while it trains: its steps are steps of the run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from elastic_train.config import Batch
from elastic_train.errors import ConfigError
from elastic_train.train.custom.artifacts import Artifacts
from elastic_train.train.custom.carried_rows import CarriedRows, places_of
from elastic_train.train.custom.context import Metric
from elastic_train.train.custom.edits import Edits
from elastic_train.train.custom.loop_stepper import LoopStepper
from elastic_train.train.custom.micro_batch_variables import Between, frame_of_job
from elastic_train.train.custom.step_of_loop import StepBatch, StepOfLoop
from elastic_train.train.custom.unkept_state import check_around, check_unkept
from elastic_train.train.declaration.abort import Paused, aborting
from elastic_train.train.declaration.declare import Declaration
from elastic_train.train.model import module_state
from elastic_train.train.model.collate import Collate
from elastic_train.train.model.registered_state import Registered
from elastic_train.train.model.rng import derive, seed_all, set_generator_states
from elastic_train.train.model.user_hooks import check_structure, check_whole, hooks_of, structure_of
from elastic_train.train.state.shards import Shards
from elastic_train.train.step.training_loop import StepReport

T = TypeVar("T")


class LoopEngine(Protocol):
    """What a running loop needs of the one that runs it."""

    @property
    def shards(self) -> Shards: ...
    @property
    def passes(self) -> LoopStepper: ...
    def commit(self, step: int) -> StepReport: ...
    def pausing(self) -> bool:
        """Whether the group has to pause at this boundary; then it was saved."""
        ...

    def save(self) -> None:
        """Save what is due, if it wasn't."""
        ...

    def end_early(self) -> None: ...

    def own(self, *, inside: bool) -> None:
        """Whether what the job does between its steps is under way."""
        ...

    def fence(self) -> None: ...
    def evaluate(self, dataset: Any, metric: Metric) -> dict[str, float]: ...
    def report(self, metrics: Mapping[str, float]) -> None: ...
    def check(self) -> None: ...


class RunningContext:
    """The context of one generation."""

    def __init__(
        self,
        engine: LoopEngine,
        declaration: Declaration,
        registered: Registered,
        *,
        max_steps: int,
        steps_per_epoch: int,
        batch: Batch,
        edits: Edits,
        artifacts: Artifacts,
        trouble_s: float,
        between: Between | None,
    ) -> None:
        """`between` looks at what a new run's loop does to its first micro-batch. Storage may fail for
        `trouble_s` before files of the end are given up."""
        self._between, self._artifacts, self._trouble_s = between, artifacts, trouble_s
        shards = engine.shards
        self.rank, self.world_size = shards.rank, shards.plan.world_size
        self.device, self.max_steps = shards.device, max_steps
        self._engine, self._declaration, self._registered = engine, declaration, registered
        self._steps_per_epoch, self._batch, self.edits = steps_per_epoch, batch, edits
        edits.enter()
        self._settings = [s for part in declaration.optimizers for s in declaration.settings[part]]
        self._things: dict[str, Any] = {}
        self._measured: list[str] = []  # names of metrics that all ranks know, where steps have any
        self._carried: list[CarriedRows] = []
        self._before = [dict(group) for group in shards.optimizer.param_groups]
        self._trained = shards.whole.trainable
        self._asked = False  # for batches
        self._entered = False  # the first batch was asked for
        self._over = False  # the last batch was given
        self._at_head = False  # a batch was given, and its step not begun
        self.in_tail = False  # a step was committed, and what follows it in the loop not done
        self._current: Iterator[Any] | None = None

    # -- declared ------------------------------------------------------------------------------------------

    def model(
        self,
        name: str,
        build: Callable[[], nn.Module],
        *,
        init: Callable[[nn.Module, str], None] | None = None,
    ) -> nn.Module:
        model = self._known(name, "model", self._declaration.models._modules)
        if name in self._registered.generators:
            set_generator_states(self._registered.generators[name])
        return model

    def optimizer(self, name: str, make: Callable[..., Any], model: Any, **settings: Any) -> Any:
        self._known(name, "optimizer", self._declaration.optimizers)
        return self._declaration.reset(name)

    def register(self, name: str, thing: T) -> T:
        self._known(name, "register", dict.fromkeys(self._declaration.things))
        if self.at > 0:
            self._registered.restore(name, thing)
        self._things[name] = thing
        return thing

    def carry(self, name: str, value: Any, *, dim: int = 0) -> CarriedRows:
        made = CarriedRows.of(name, value, dim, self._batch.global_size, self.device)
        made.places = lambda: places_of(self._engine.passes.job, self._batch.micro_size)
        self._carried.append(made)
        return self.register(name, made)

    # -- training ------------------------------------------------------------------------------------------

    @property
    def at(self) -> int:
        step = self._engine.shards.step
        assert step is not None
        return step

    def batches(self, dataset: Any, *, collate: Collate | None = None) -> Iterator[StepBatch]:
        if self._asked:
            raise ConfigError(
                field="ctx.batches",
                problem="it was called before, and the batches of that call are those of the whole run, of "
                "its own data set.",
                remedy="Use one loop: choose what a step does by batch.step, and put data sets together.",
            )
        check_around(sys._getframe(1))
        self._asked = True
        return self._batches()

    def _batches(self) -> Iterator[StepBatch]:
        self._enter()
        frame, said = sys._getframe(1), self.at > 0
        while True:
            if self._at_head:
                raise ConfigError(
                    field="ctx.batches",
                    problem=f"the batch of step {self.at + 1} was left without a step.",
                    remedy="Every batch has one `with ctx.step()`; return to end the run early.",
                )
            self._boundary()
            if self.at >= self.max_steps:
                self._over = True
                self._engine.own(inside=True)
                return
            self._at_head = True
            step = self.at + 1
            if not said:
                said = True
                check_unkept(frame, self, self._things.values(), warns=self.rank == 0)
            seed_all(derive(self._batch.seed, "loop", step), self.device)  # drawn before the step
            self._engine.own(inside=True)
            yield StepBatch(self._engine.passes, step, self._steps_per_epoch, self._iterated)

    @contextmanager
    def step(self, metrics: tuple[str, ...] | None = ()) -> Iterator[StepOfLoop]:
        if not self._at_head:
            raise ConfigError(
                field="ctx.step",
                problem="there is no batch for it.",
                remedy="One `with ctx.step()` for each batch of ctx.batches(...).",
            )
        self._engine.own(inside=False)
        passes, number = self._engine.passes, self.at + 1
        check_structure(self._structure, self._engine.shards.model)
        self.edits.check_head(self._engine.shards)
        with aborting():
            self._engine.check()
            self._engine.save()  # now that metrics of the state are known
            self._bring()
        self._at_head = False
        passes.begin(number)
        step = StepOfLoop(passes, self._engine.fence, metrics, self._measured)
        yield step
        with aborting():
            rows = [each.agreed(lambda t: passes.over_ranks(t, "what is carried")) for each in self._carried]
            step.end(self._engine.commit, self.world_size)
        for each, value in zip(self._carried, rows, strict=True):
            if not step.skipped:
                each.value = value
        self.edits.begin(self._engine.shards)
        self.in_tail = True
        self._engine.own(inside=True)

    def evaluate(self, dataset: Any, metric: Metric) -> dict[str, float]:
        if not (self._at_head or self._over):
            raise ConfigError(
                field="ctx.evaluate",
                problem="after a step it would not be measured anew where it is broken off.",
                remedy="Evaluate before `with ctx.step()`, for the steps committed so far, or after the "
                "last batch.",
            )
        shards = self._engine.shards
        if self._at_head:
            self.edits.check_head(shards)
        self._engine.own(inside=False)
        with aborting():
            found = self._engine.evaluate(dataset, metric)
        self.edits.evaluated(shards)
        self._engine.own(inside=True)
        return found

    @property
    def artifacts(self) -> Path:
        return self._artifacts.of(self.at)

    def report(self, **metrics: float) -> None:
        self._engine.report({name: float(value) for name, value in metrics.items()})

    def end(self) -> None:
        """The loop returned. All ranks must come here after the same step."""
        if not self._entered:
            raise ConfigError(field="loop", problem="it returned without asking for ctx.batches(...).")
        self._engine.own(inside=False)
        with aborting():
            if self._over:
                self._bring(ends=True)  # with the checkpoint of the last step the run is over
                self._engine.save()
                return
            self._engine.check()
            if self.world_size > 1:
                meeting = torch.zeros((), dtype=torch.float64, device=self.device)
                dist.all_reduce(meeting)
                meeting.item()  # a device would not wait for the others
                self._engine.check()
            self._capture()
            self._bring(ends=True)
            self._engine.end_early()

    def _bring(self, *, ends: bool = False) -> None:
        """What the loop wrote into files is brought to storage, by one rank."""

        def waits() -> None:
            self._engine.own(inside=False)
            self._engine.check()
            self._engine.own(inside=True)  # anew: a wait for storage is no hang

        self._engine.own(inside=True)
        within_s = self._trouble_s if ends else None
        self._artifacts.bring(self.at, uploads=self.rank == 0, ends_within_s=within_s, waits=waits)
        self._engine.own(inside=False)

    def sets_by_hand(self) -> bool:
        """Whether hyperparameters are not as the last update, or boundary, left them."""
        shards = self._engine.shards
        return shards.moving.differs(shards.optimizer)

    def close(self) -> None:
        """The loop was left, whatever way."""
        current, self._current = self._current, None
        if current is not None:
            current.close()  # type: ignore[attr-defined]

    # -- private -------------------------------------------------------------------------------------------

    def _enter(self) -> None:
        if self._entered:
            return
        missing = set(self._declaration.things) - self._things.keys()
        if missing:
            raise ConfigError(
                field=f"ctx.register({min(missing)!r})",
                problem="was declared when the loop was first entered, and now it is not.",
                remedy="Declare the same state each time.",
            )
        self._entered = True
        shards = self._engine.shards
        if self.at > 0:  # what the code before the first batch set, it set for the first step
            for number, group in enumerate(shards.optimizer.param_groups):
                moved = shards.moving.entries(number)
                group.update(
                    {
                        key: value
                        for key, value in self._before[number].items()
                        if key != "params" and (self._registered.schedules or key in moved)
                    }
                )
            shards.train(self._trained)
            module_state.restore(shards.model, shards.modules, shards.device)
        self._structure = structure_of(shards.model)
        for fqn, parameter in shards.parameters.items():
            if hooks_of({fqn: parameter}, engines=False):
                check_whole(fqn, parameter)

    def _boundary(self) -> None:
        self._capture()
        with aborting():
            self._bring()
            # Behind the last step nobody pauses: its checkpoint ends the run, and the loop has not yet.
            if self.at < self.max_steps and self._engine.pausing():
                raise Paused
            self._engine.check()

    def _capture(self) -> None:
        shards = self._engine.shards
        self._engine.passes.adopt_buffers()
        if self.at > 0:
            for name, thing in self._things.items():
                self._registered.capture(name, thing)
            shards.moving.compare(shards.optimizer, self._settings)
            shards.moving.capture(shards.optimizer)
            shards.look_at_modules()
        if self.in_tail:
            self.edits.passed(shards)
        trainable = tuple(fqn for fqn, p in shards.parameters.items() if p.requires_grad)
        shards.whole = replace(shards.whole, trainable=trainable)
        self.in_tail = False

    def _iterated(self, micro_batches: Iterator[Any]) -> Iterator[Any]:
        self._current, between = micro_batches, self._between
        self._between = None
        while True:
            with aborting():
                try:
                    batch = next(micro_batches)
                except StopIteration:
                    return
            frame = frame_of_job(sys._getframe(1)) if between is not None else None
            if between is None or frame is None:
                yield batch
                continue
            between.first(frame)
            yield batch
            between.check(frame)
            between = None

    def _known(self, name: str, what: str, known: Mapping[str, Any]) -> Any:
        if name not in known:
            raise ConfigError(
                field=f"ctx.{what}({name!r})",
                problem="was not declared when the loop was first entered.",
                remedy="Declare the same state each time, before the first batch.",
            )
        return known[name]
