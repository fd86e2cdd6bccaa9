"""Run a user's training loop for one generation in place of the engine's loop."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from elastic_train.config import RunSpec
from elastic_train.errors import ConfigError
from elastic_train.recovery.evidence import Vote
from elastic_train.storage.fsspec_store import child_url, open_store
from elastic_train.storage.store import Store
from elastic_train.train.best_metric import LOSS
from elastic_train.train.custom.artifacts import Artifacts
from elastic_train.train.custom.context import Metric
from elastic_train.train.custom.edits import Edits
from elastic_train.train.custom.loop_stepper import LoopStepper
from elastic_train.train.custom.micro_batch_variables import Between
from elastic_train.train.custom.running_context import RunningContext
from elastic_train.train.declaration.abort import Broken, Paused
from elastic_train.train.declaration.declare import declared
from elastic_train.train.declaration.loop_task import LoopTask
from elastic_train.train.model.plain_build import seed_as_a_script_does
from elastic_train.train.state.sharded_trial import sets_data
from elastic_train.train.state.shards import Shards
from elastic_train.train.step.evaluate import Evaluator
from elastic_train.train.step.repeatable import surroundings_of
from elastic_train.train.step.stepper import Stepper
from elastic_train.train.step.training_loop import Loop, RunEnd, StepReport
from elastic_train.train.step.vote import StepStatistics
from elastic_train.train.task import Evaluation

BETWEEN_STEPS = "loop"
"""The phase of what a loop does between its steps."""


class UsersLoop(Loop):
    """What the user's code does between two votes is its own; votes, saves and pauses are the engine's."""

    STEPPER: ClassVar[type[Stepper]] = LoopStepper

    @property
    def shards(self) -> Shards:
        return self._shards

    @property
    def passes(self) -> LoopStepper:
        assert isinstance(self._stepper, LoopStepper)
        return self._stepper

    def _run(self) -> RunEnd:
        task, shards = self._task, self._shards
        assert isinstance(task, LoopTask)
        assert shards.registered is not None
        sets = sets_data(task) if shards.plan.mesh.dp_shard > 1 else None
        if sets is not None:
            raise ConfigError(
                field="parallelism.dp_shard",
                problem=f"{sets}.",
                remedy="Write into the tensor, by copy_(...) under torch.no_grad(), or use "
                "Parallelism(dp_shard=1).",
            )
        self._outcome: StepStatistics | None = None  # of a step whose boundary was not passed
        self._last = self._known(shards.applied)
        self._metrics: dict[str, float] = {}
        self._own, self._inside = ExitStack(), False
        if task.edits is None:
            task.edits = Edits()
        if task.artifacts is None:
            task.artifacts = Artifacts(partial(_store, self._spec))
        task.artifacts.enter(self._at())
        context = RunningContext(
            self,
            declared(shards.model),
            shards.registered,
            max_steps=self._spec.max_steps,
            steps_per_epoch=self._order.steps_per_epoch,
            batch=self._spec.batch,
            edits=task.edits,
            artifacts=task.artifacts,
            trouble_s=self._spec.timing.storage_trouble_s,
            between=None if shards.step else Between(shards.model, surroundings_of(task, shards.model)),
        )
        done = False
        seed_as_a_script_does(self._spec.batch.seed)  # what is drawn before the first batch
        try:
            task.loop(context)
            context.end()
            done = True
        except Paused:
            done = True
            return RunEnd(kind="paused", step=self._at())
        except Broken as broken:
            raise broken.error from broken
        except Exception as error:
            meant = self._guard.translated(error, "the loop", (shards.step or 0) + 1, True)
            if meant is error:
                raise
            raise meant from error
        finally:
            self.own(inside=False)
            context.close()
            if not done:
                self._broken_off(context)
        return RunEnd(kind="finished", step=self._at())

    def _broken_off(self, context: RunningContext) -> None:
        """Back to the last boundary. A gradient is kept only where it and the models are all of the step."""
        shards = self._shards
        if shards.step is None:
            return
        registers = shards.registered is not None and bool(shards.registered.things)
        # Where it isn't known that nothing follows a step, a gradient is not applied without the loop.
        if self.passes.updated or registers or context.edits.found is not False:
            self.passes.put_back()
            shards.drop_gradients()
        if context.in_tail and (registers or context.edits.changed(shards) or context.sets_by_hand()):
            shards.step = None  # what the loop changes after a step is neither of this one nor of the next

    def _known(self, vote: Vote | None) -> StepReport | None:
        if vote is None:
            return None
        outcome = StepStatistics.unpacked(vote.values)
        report = self._report(vote, outcome)
        if outcome.squares < 0:  # completed by a roll forward: nobody saw its vote
            self._on_step(report)
        return report

    # -- what the loop asks for ----------------------------------------------------------------------------

    def own(self, *, inside: bool) -> None:
        """What the job does between its steps begins, or is over. It may draw samples, or write files, for as
        long as `user_code_s`: neither it nor who waits for it hangs."""
        if inside and not self._inside:
            self._mark(BETWEEN_STEPS, self._at(), -1)
            self._own.enter_context(self._guard.at("the loop", self._at()))
        elif not inside:
            self._own.close()
        self._inside = inside

    def commit(self, step: int) -> StepReport:
        self._outcome, report = self._committed(step)
        self.passes.done()
        self._last, self._metrics, self._found = report, {}, {}
        return report

    def pausing(self) -> bool:
        if self._outcome is None or self._outcome.pause == 0:
            return False
        self.save()
        return True

    def save(self) -> None:
        outcome, self._outcome = self._outcome, None
        if outcome is None:
            return  # the state was there when the loop was entered
        self._compare(self._at())
        if self._saver is not None:
            self._save(self._saver, self._at(), outcome)

    def _may_be_best(self) -> bool:
        """Whether the loop reported what may be the best; a report of one rank is enough."""
        if self._spec.checkpoints.best in (None, LOSS):
            return False
        worth = self._best.is_worth_saving(self._found)
        shards = self._shards
        if shards.plan.world_size == 1:
            return worth
        flag = torch.tensor([float(worth)], device=shards.device)
        with self._guard.collective("agreeing on a checkpoint", self._at()):
            self._group.check()
            dist.all_reduce(flag)
            return bool(flag)

    def end_early(self) -> None:
        if self._last is not None:
            self._on_step(replace(self._last, metrics=self._reported(), last=True))
        if self._saver is not None:
            self._mark("save", self._at(), -1)
            reported = {"loss": self._last.loss if self._last is not None else math.nan, **self._metrics}
            self._shards.metrics = {name: value for name, value in reported.items() if math.isfinite(value)}
            self._saver.take(self._shards, storage=True, wait=True)

    def fence(self) -> None:
        if self._saver is not None:
            self._saver.fence()

    def check(self) -> None:
        self._group.check()

    def report(self, metrics: Mapping[str, float]) -> None:
        if self._last is not None:
            self._best.check_reported(metrics, self._last.loss)
            self._metrics.update(metrics)
            self._found = self._metrics
            self._on_step(replace(self._last, metrics=self._reported()))

    def evaluate(self, dataset: Any, metric: Metric) -> dict[str, float]:
        step, shards = self._at(), self._shards
        evaluator = Evaluator(
            self._task,
            Evaluation(dataset=dataset, metric=lambda output, _: metric(output)),
            self._spec,
            model=shards.model,
            parameters=shards.parameters,
            plan=shards.plan,
            rank=shards.rank,
            device=shards.device,
            group=self._group,
            guard=self._guard,
            place=shards.place,
            dumps=self._loader.dumps,
        )
        self._mark("evaluation", step, -1)
        try:
            return evaluator.run(step, self._mark)
        finally:
            evaluator.close()

    def _reported(self) -> tuple[tuple[str, float], ...]:
        return tuple(sorted(self._metrics.items()))


def _store(spec: RunSpec) -> Store:
    """The run's directory."""
    return open_store(child_url(spec.storage_path, spec.name))
