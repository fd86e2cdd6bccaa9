"""Training loop: gradients, vote, report and update of each step, then saves and evaluations."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal

from elastic_train.control.schedule import at_boundary
from elastic_train.data.order import fold_digests
from elastic_train.errors import ConfigError
from elastic_train.recovery.evidence import Vote
from elastic_train.train.best_metric import Best
from elastic_train.train.model.average import in_place
from elastic_train.train.snapshot.saver import Saver
from elastic_train.train.state.compare_replicas import compare_replicas
from elastic_train.train.state.shards import Shards
from elastic_train.train.step.evaluate import Evaluator
from elastic_train.train.step.gradients import check_edits, edited, edits
from elastic_train.train.step.rehearse_ahead import rehearse
from elastic_train.train.step.stepper import Stepper
from elastic_train.train.step.stopping import is_over, looked_at
from elastic_train.train.step.update import commit, gradient_norm
from elastic_train.train.step.vote import StepStatistics
from elastic_train.train.step.workload import GroupContext, Workload
from elastic_train.train.task import average_of, evaluation_of

SNAPSHOT_S, POLL_S = 10.0, 0.05
"""How long a step waits for the snapshot before, and how often it looks whether its group was broken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """A committed step, as every rank sees it. `loss` is the mean over `tokens`, the count of the task.

    `seconds` reach from the previous vote to this one. `metrics` are of an evaluation after the step.
    """

    generation: int
    rank: int
    step: int
    loss: float
    tokens: float
    grad_norm: float
    skipped: bool
    seconds: float
    rates: tuple[float, ...]  # learning rate of each parameter group in this step
    ids_digest: int
    vote: Vote
    metrics: tuple[tuple[str, float], ...] = ()
    last: bool = False  # the user's loop ended the run with it


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    kind: Literal["finished", "paused"]
    step: int


@dataclass(slots=True, kw_only=True, eq=False)
class Requests:
    """What was asked of this rank since the last vote; set from any thread."""

    pause: bool = False
    save: bool = False


class Loop:
    """The training of one generation on one rank."""

    STEPPER: ClassVar[type[Stepper]] = Stepper

    def __init__(
        self,
        workload: Workload,
        context: GroupContext,
        shards: Shards,
        *,
        requests: Requests,
        on_step: Callable[[StepReport], None],
        saver: Saver | None,
    ) -> None:
        task, spec, guard = workload.task, workload.spec, context.guard
        self._task, self._spec, self._shards = task, spec, shards
        self._order, self._loader = workload.order, workload.loader
        self._group, self._guard, self._mark = context.group, guard, context.mark
        self._requests, self._on_step, self._saver = requests, on_step, saver
        self._best = Best(spec.checkpoints)
        self._found: Mapping[str, float] = {}  # what the last step's evaluation measured
        self._owed = False  # a checkpoint that was due, and some rank had no room for it
        self._agreed = shards.step or 0  # the last step at which replicas held the same
        self._compare_at = self._agreed + 1
        self._compared_step, self._compared_at = self._agreed, time.monotonic()
        self._voted_at = time.monotonic()
        check_edits(task, spec)
        with guard.collective("preparing", shards.step or 0):
            fence = saver.fence if saver is not None else lambda: None
            self._stepper = self.STEPPER(workload, context, shards, fence=fence)
        with guard.at("building the evaluation", shards.step or 0):
            evaluation = evaluation_of(task)
            if evaluation is not None and evaluation.every == "epoch":
                evaluation = replace(evaluation, every=workload.order.steps_per_epoch)
            self._best.check(evaluation)
        self._evaluation, self._measured = evaluation, dict[str, float]()
        average = average_of(task)
        averages = nullcontext[None]
        if average is not None and average.evaluated:
            averages = partial(in_place, shards.optimizer, shards.parameters)
        self._evaluator = evaluation and Evaluator(
            task,
            evaluation,
            spec,
            model=shards.model,
            parameters=shards.parameters,
            plan=shards.plan,
            rank=shards.rank,
            device=shards.device,
            group=context.group,
            guard=guard,
            place=shards.place,
            regions=shards.regions,
            dumps=workload.loader.dumps,
            averages=averages,
        )
        if evaluation is None and shards.schedule is not None:
            shards.schedule.check_measured(())

    def run(self) -> RunEnd:
        """Until the last step or a voted pause."""
        try:
            return self._run()
        finally:
            if self._evaluator is not None:
                self._evaluator.close()

    def _run(self) -> RunEnd:
        vote, self._last = self._shards.applied, None
        if vote is not None:
            outcome = StepStatistics.unpacked(vote.values)
            report = self._report(vote, outcome)
            if outcome.squares < 0:  # completed by a roll forward: nobody saw its vote
                self._on_step(report)
            self._last = report
            self._evaluate(report)  # if the generation before did not get to the end of it
        elif self._at() == 0:
            max_steps = self._spec.max_steps
            evaluator = self._evaluator
            names = rehearse(self._stepper, evaluator, self._shards, self._order, max_steps, self._mark)
            if evaluator is not None:
                self._check_names(names, complete=not evaluator.summarises)
        while (step := self._at()) < self._spec.max_steps:
            if is_over(self._evaluation, self._shards.watched):
                self._end_early()
                break
            outcome, self._last = self._committed(step + 1)
            self._compare(step + 1)
            if self._saver is not None:
                self._save(self._saver, step + 1, outcome)
            if outcome.pause > 0:
                return RunEnd(kind="paused", step=step + 1)
        return RunEnd(kind="finished", step=step)

    def _committed(self, step: int) -> tuple[StepStatistics, StepReport]:
        began = time.monotonic()
        with self._stepper.broken.keeping():
            statistics = self._stepper.gradients(step)
            if edits(self._task):
                self._mark("gradients", step, -1)
                self._stepper.broken.edited()
                statistics = edited(self._task, self._shards, step, statistics, self._spec, self._guard)
            pause, save = self._requests.pause, self._requests.save
            statistics = replace(statistics, pause=float(pause), save=float(save))
            if self._saver is not None:
                self._saver.count_step()
                self._wait_for(self._saver, step)
                busy, behind = self._saver.busy(storage=False), self._saver.busy(storage=True)
                statistics = replace(statistics, busy=float(busy), behind=float(behind))
            vote = self._stepper.vote(step, statistics)
        # Only what entered this vote is done; a request that came during it waits for the next.
        self._requests.pause ^= pause
        self._requests.save ^= save
        outcome = StepStatistics.unpacked(vote.values)
        report = replace(self._report(vote, outcome), metrics=tuple(sorted(self._measure(step).items())))
        self._on_step(report)
        if self._saver is not None:
            self._saver.fence()
        self._mark("optimizer", step, -1)
        with self._guard.at("the optimizer", step):
            commit(self._shards, vote, self._spec)
        if self._saver is not None:
            self._saver.step_took(time.monotonic() - began)
        self._evaluate(report)
        return outcome, report

    def _measure(self, step: int) -> dict[str, float]:
        """What the task measures of the step itself."""
        if self._stepper.measured is None:
            return {}
        with self._guard.collective("summing metrics", step):
            self._measured = self._stepper.measured.means()
        return self._measured

    def _check_names(self, names: tuple[str, ...], *, complete: bool) -> None:
        """ConfigError, before step 1, for metrics that an evaluation was to measure and does not."""
        self._best.check_measured(names, complete=complete)
        if complete and self._evaluation is not None and self._evaluation.patience is not None:
            self._evaluation.watched(names)
        if complete and self._shards.schedule is not None:
            self._shards.schedule.check_measured(names)

    def _end_early(self) -> None:
        """Patience is at its end: this step is the last."""
        step = self._at()
        if self._last is not None:
            found = tuple(sorted((self._measured | dict(self._found)).items()))
            self._on_step(replace(self._last, metrics=found, last=True))
        if self._saver is not None:
            self._mark("save", step, -1)
            self._saver.take(self._shards, storage=True, wait=True)

    def _wait_for(self, saver: Saver, step: int) -> None:
        """Where a snapshot belongs to every so many steps, there has to be memory for it, and the one before
        has to be whole on all ranks.
        """
        give_up, every = time.monotonic() + SNAPSHOT_S, self._spec.checkpoints.every
        due = step == self._spec.max_steps or (isinstance(every, int) and step % every == 0)
        while not saver.ready(POLL_S, storage=due) and time.monotonic() < give_up:
            self._group.check()

    def _evaluate(self, report: StepReport) -> None:
        """Where it is due and was not done: measure, and report the step again with its metrics."""
        evaluator, step, self._found = self._evaluator, report.step, {}
        if evaluator is None or not evaluator.due(step) or self._shards.evaluated == step:
            return
        if self._shards.late:
            self._compare(step)
        self._mark("evaluation", step, -1)
        metrics, shards = evaluator.run(step, self._mark), self._shards
        self._best.check_measured(metrics)
        for name in metrics.keys() & self._measured.keys():
            raise ConfigError(
                field="task.metrics",
                problem=f"{name!r} is what the evaluation measures, too: reports would mix the two.",
                remedy=f"Name it 'train_{name}'.",
            )
        if shards.schedule is not None:
            shards.schedule.check_measured(metrics)
            shards.schedule.measured(metrics)
        if self._evaluation is not None and self._evaluation.patience is not None:
            shards.watched = looked_at(self._evaluation, shards.watched, metrics)
        shards.evaluated = step
        self._found = metrics
        self._on_step(replace(report, metrics=tuple(sorted((self._measured | metrics).items()))))

    def _compare(self, step: int) -> None:
        """After the first step of a generation, and then as often as was said, or costs little. Before what
        some ranks were given during the first step is used, in any case.
        """
        every = self._spec.compare_replicas
        due = step >= self._compare_at if every == "auto" else every is not None and step % every == 0
        due |= bool(self._shards.late)
        if not due or self._shards.plan.world_size == 1:
            return
        now = time.monotonic()
        step_s = (now - self._compared_at) / max(1, step - self._compared_step)
        self._mark("compare", step, -1)
        with self._guard.collective("comparing replicas", step):
            self._compare_at = step + compare_replicas(self._shards, self._agreed, step_s)
        self._agreed = self._compared_step = step
        self._compared_at = time.monotonic()

    def _report(self, vote: Vote, outcome: StepStatistics) -> StepReport:
        now = time.monotonic()
        seconds, self._voted_at = now - self._voted_at, now
        return StepReport(
            generation=self._shards.generation,
            rank=self._shards.rank,
            step=vote.step,
            loss=outcome.mean_loss,
            tokens=outcome.count,
            grad_norm=gradient_norm(outcome, self._spec),
            skipped=outcome.skipped,
            seconds=seconds,
            rates=tuple(float(group["lr"]) for group in self._shards.optimizer.param_groups if "lr" in group),
            ids_digest=fold_digests(outcome.ids),
            vote=vote,
        )

    def _save(self, saver: Saver, step: int, outcome: StepStatistics) -> None:
        """Take the snapshots that are due and have room on every rank: all ranks decide the same."""
        self._shards.metrics = self._metrics_of(outcome)
        every = self._spec.checkpoints.every
        assert every != "epoch", "a run counts steps"
        taken = at_boundary(
            step=step,
            last=step == self._spec.max_steps,
            pausing=outcome.pause > 0,
            every=every,
            pressure=self._spec.checkpoints.pressure,
            asked=outcome.save > 0,
            owed=self._owed,
            may_be_best=self._may_be_best(),
            no_room_for_storage=outcome.behind > 0,
            peers_wanted=saver.every_step and outcome.busy == 0,
        )
        self._owed = taken.owed
        if taken.snapshot:
            self._mark("save", step, -1)
            if taken.wait and self._spec.checkpoints.pressure == "wait":
                self._until_written(saver)
            saver.take(self._shards, storage=taken.storage, wait=taken.wait)

    def _until_written(self, saver: Saver) -> None:
        """Until this rank's part of the checkpoint before is durable: else the next one may overtake it, and
        it is never committed. Not for as long as would count as a hang."""
        give_up = time.monotonic() + self._spec.timing.stall_s / 2
        while saver.busy(storage=True) and time.monotonic() < give_up:
            self._group.check()
            saver.ready(POLL_S, storage=True)
            time.sleep(POLL_S)

    def _metrics_of(self, outcome: StepStatistics) -> dict[str, float]:
        """Of the present state, those that are numbers."""
        reported = {"loss": outcome.mean_loss, **self._measured, **self._found}
        return {name: value for name, value in reported.items() if math.isfinite(value)}

    def _may_be_best(self) -> bool:
        return self._best.is_worth_saving(self._found)

    def _at(self) -> int:
        step = self._shards.step
        assert step is not None, "torn shards cannot train"
        return step
