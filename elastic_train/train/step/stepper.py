"""Stepper: one optimizer step up to its vote (forward, backward, gradient reduction, vote)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
import torch.distributed as dist

from elastic_train.data.order import MicroBatch, ids_digest
from elastic_train.planner.quotas import shares_left, shares_without
from elastic_train.recovery.evidence import Vote
from elastic_train.train.boundary.crossing import KeptCrossings
from elastic_train.train.boundary.sender import Sender
from elastic_train.train.collectives.gradient_reduction import is_sharded
from elastic_train.train.declaration.loop_task import LoopTask
from elastic_train.train.model.build import DTYPE_OF
from elastic_train.train.model.collate import caller, placed
from elastic_train.train.model.compiled import is_compiled
from elastic_train.train.model.positions import asking, divided_positions, here_of, part_of_masks
from elastic_train.train.model.rng import Randomness
from elastic_train.train.model.weight_casts import cast_again
from elastic_train.train.parallel.parallelize import COMPUTED, compute_in, sync_gradients
from elastic_train.train.parallel.trained_parts import TrainedParts
from elastic_train.train.parallel.unit_calls import UnitCalls
from elastic_train.train.parallel.vocabulary_parallel_loss import of_parts, whole, whole_output
from elastic_train.train.state.shards import Shards
from elastic_train.train.step.broken_step import BrokenStep
from elastic_train.train.step.changing_buffers import ChangingBuffers
from elastic_train.train.step.checked_loss import checked_loss
from elastic_train.train.step.gradient_sums import GradientSums
from elastic_train.train.step.micro_batch_work import Flight, Tally, Work
from elastic_train.train.step.optimizer_in_backward import InBackward, opening
from elastic_train.train.step.pipeline_schedule import passes_of
from elastic_train.train.step.rehearsal import Rehearsal, check_unchanged, versions
from elastic_train.train.step.repeatable import Repeatable, surroundings_of
from elastic_train.train.step.split_backward import backward_to_input
from elastic_train.train.step.stage_transfer import ReplayedBoundary, StageBoundary
from elastic_train.train.step.training_metrics import TrainingMetrics, measures
from elastic_train.train.step.vote import StepStatistics
from elastic_train.train.step.workload import GroupContext, Workload
from elastic_train.train.task import takes_step


class Stepper:
    """Runs the steps of one generation on its shards."""

    OVERLAPS: ClassVar[bool] = True  # sums are begun while a backward runs

    def __init__(
        self,
        workload: Workload,
        context: GroupContext,
        shards: Shards,
        *,
        replayed: KeptCrossings | None = None,
        fence: Callable[[], None] = lambda: None,
    ) -> None:
        """`replayed` is a log that stands for the other stages: nothing is sent then. `fence` is waited for
        before a backward that updates parameters."""
        self._replayed = replayed
        task, spec, mark = workload.task, workload.spec, context.mark
        self._task, self._spec, self._shards = task, spec, shards
        self._order, self._loader = workload.order, workload.loader
        self._group, self._guard, self._mark = context.group, context.guard, mark
        rules, place = task.parallelize(), shards.place
        self._beside = rules.beside
        self._call = caller(shards.model, rules.beside, "" if place.last else rules.hands_on)
        self._place, data = shards.place, shards.place.data
        keeps = replayed is None and self.OVERLAPS and not spec.optimizer_in_backward and shards.whole_here
        self._sums = GradientSums(shards, context.group, replayed, overlaps=self.OVERLAPS, keeps=keeps)
        assert shards.blueprint is not None
        self.trained = TrainedParts(shards.blueprint, shards.parameters)
        self._tally = Tally()
        most = max(shards.plan.world_size, spec.max_workers)
        self._buffers = ChangingBuffers(shards.model, most, data)
        self._several = most > 1
        self._fence = fence
        self._late, self._first = shards.late, (shards.step or 0) + 1
        self._updates = None
        if spec.optimizer_in_backward and replayed is None:  # what is replayed is updated after its vote
            self._updates = InBackward(
                shards,
                spec,
                self._sums.presence,
                buffers=self._buffers.changing,
                mark=lambda step, ahead: mark("update", step, ahead),
                check=context.group.check,
            )
        trainable = {fqn: p for fqn, p in shards.parameters.items() if p.requires_grad}
        if self._updates is not None:
            self._sums.ready = self._updates.ready
        self._sums.choose(trainable)
        if self._updates is not None:
            self._updates.watch(fqn for fqn, p in trainable.items() if data is None or is_sharded(p))
        self._takes_step, self._here = takes_step(task), here_of(shards.place)
        self._casts = spec.precision in COMPUTED and not is_compiled(shards.model)
        self.measured = TrainingMetrics(task, shards) if measures(task) and replayed is None else None
        self.broken = BrokenStep(shards, self._sums, self._buffers, self.measured, on=keeps)
        self._randomness = Randomness(
            shards.model,
            seed=spec.batch.seed,
            device=shards.device,
            around=shards.regions.around if shards.regions else None,
            part=part_of_masks(self._here, shards.regions.part if shards.regions else None),
        )
        # What a run is made of is looked at once, at its start.
        starts = shards.step == 0 and replayed is None
        sharded = self.trained.sharded
        code = surroundings_of(task, shards.model) if starts or sharded else None
        surroundings = code if starts else None
        loop = (task.loop,) if isinstance(task, LoopTask) else ()
        self._units = UnitCalls(shards.model, data, shards.device, code=loop)
        self._freezes = sharded and code is not None and bool(code.sets_grad)
        self._rehearsal = Rehearsal(
            shards.model if starts else None,
            buffers=self._buffers,
            randomness=self._randomness,
            parameters=shards.parameters,
            device=shards.device,
            several=self._several,
            trained=self.trained,
            surroundings=surroundings,
        )
        self._repeatable = Repeatable(
            task,
            self._randomness.rehearsing,
            shards.device,
            surroundings=surroundings,
            several=self._several,
        )

    def gradients(self, step: int) -> StepStatistics:
        """The summed gradient of the step into `grad`, on all ranks; this rank's numbers for the vote.

        Loss and gradient are sums over the global batch, the gradient divided by the nominal count.
        """
        try:
            return self._gradients(step)
        except BaseException:
            if self._updates is not None:
                self._updates.broken(self._sums.came())
            raise

    def _gradients(self, step: int) -> StepStatistics:
        self._shards.drop_gradients()
        self._sums.presence.reset()
        self._tally = self.broken.begin(step)
        work = self.work(step)
        before = versions(self._shards.parameters) if self._updates is None else {}
        for _ in self.passes(step, work):
            pass
        check_unchanged(before, self._shards.parameters, self._several)
        if self._updates is not None and not work:
            self._open(step)
        self._mark("reduce", step, -1)
        with self._guard.collective("the reduction", step):
            self._sums.reduce(step)
            self._shards.pending.buffers = self._buffers.fold(self._order.count(step))
            if self._updates is not None:
                self._updates.rest()
            square_sum, finite = self._sums.squares()
        if self._updates is not None:
            square_sum = self._updates.unscaled(square_sum)
        square_sum /= self._loss_scale**2
        statistics = self._forwards()
        return replace(statistics, squares=square_sum, nonfinite=statistics.nonfinite or float(not finite))

    @property
    def _loss_scale(self) -> float:
        scale = self._shards.scale
        return 1.0 if scale is None else scale.value

    def _forwards(self) -> StepStatistics:
        """What this rank's forwards say to the vote."""
        reported, counts = self._tally, self._place.counts
        loss = float(reported.loss)
        finite = math.isfinite(loss)
        return StepStatistics(
            loss=loss if finite and counts else 0.0,
            count=reported.count if counts else 0.0,
            nonfinite=0.0 if finite else 1.0,
            ids=float(ids_digest(reported.ids)) if self._place.speaks else 0.0,
        )

    def _open(self, step: int) -> None:
        """Before its last backward: what the updates have to know of all ranks, if there are any."""
        assert self._updates is not None
        self._fence()
        packed = self._forwards().packed(self._shards.device)
        with self._guard.collective("the opening", step):
            self._group.check()
            if self._shards.plan.world_size > 1:
                dist.all_reduce(packed)
            agreed = opening(step, StepStatistics.unpacked(tuple(packed.tolist())))
        if agreed is not None:
            self._updates.begin(step, agreed)

    def _opened(self, step: int, work: Sequence[Work]) -> StageBoundary | None:
        """The ends of this rank's stage; what it sends goes into its log."""
        if self._place.pipe is None and self._replayed is None:
            return None
        sending = [(job.micro_batch.index, job.filler) for job in work]
        sender = Sender(self._shards.log, self._shards.edges, step=step, work=sending)
        if self._replayed is not None:
            return ReplayedBoundary(self._place, self._shards.device, self._replayed, sender)
        return StageBoundary(self._place, self._shards.device, sender)

    def vote(self, step: int, statistics: StepStatistics) -> Vote:
        """Sum the ranks' numbers. From here on this rank keeps the step's whole gradient."""
        shards = self._shards
        packed = statistics.packed(shards.device)
        with shards.lock:
            shards.pending.reached = step
        if shards.log is not None:
            shards.log.close_step(step)
        self._mark("vote", step, -1)
        with self._guard.collective("the vote", step):
            self._group.check()
            if shards.plan.world_size > 1:
                dist.all_reduce(packed)
            vote = Vote(step=step, values=tuple(packed.tolist()))
        if shards.log is not None:
            shards.log.seal(vote)
        return vote

    def work(self, step: int) -> list[Work]:
        """What this rank runs: fillers first, then its micro-batches by ascending index.

        With sharded parameters every forward and backward communicates, so all ranks run equally many.
        """
        plan = self._shards.plan
        micro_batches = self._order.micro_batches(step)
        planned, computed = plan.shares, self._shards.computed
        late = {plan.mesh.dp_index(rank) for rank in self._late}
        if late and step == self._first and not computed:  # they take part in the sums alone
            planned = shares_without(planned, late)
        shares = [[i for i in share if i < len(micro_batches)] for share in planned]
        if computed and step == self._first:
            shares = shares_left(shares, computed, late)
        own = shares[plan.mesh.dp_index(self._shards.rank)]
        rounds = max(map(len, shares)) if plan.mesh.dp_shard > 1 else len(own)
        fillers = [Work(micro_batch=micro_batches[own[0] if own else 0], filler=True)] * (rounds - len(own))
        return [*fillers, *(Work(micro_batch=micro_batches[i], filler=False) for i in own)]

    def passes(self, step: int, work: Sequence[Work], *, rehearsed: bool = False) -> Iterator[Flight]:
        """Forward and backward of all work; each micro-batch once its gradients are there, in order.

        A stage of a pipeline runs some forwards ahead. One that is replayed is alone, and has nothing to gain
        from a split backward. What is only `rehearsed` sums nothing over replicas and updates nothing.
        """
        boundary, place = self._opened(step, work), self._place
        schedule = self._shards.plan.schedule if self._replayed is None else "1F1B"
        splits = schedule == "ZeroBubble" and not place.first
        ahead: deque[Flight] = deque()
        behind: deque[Flight] = deque()
        for kind, number in passes_of(schedule, len(work), stage=place.stage, stages=place.mesh.pp):
            if kind == "forward" or not self.broken.on:  # else what is begun is ended, and kept
                self._group.check()
            if kind == "forward":
                upcoming = [] if rehearsed else self._upcoming(step, work, number)
                ahead.append(self._forward(step, work[number], upcoming, boundary))
                continue
            if kind == ("weights" if splits else "backward"):
                self._completing(step, last=number == len(work) - 1, rehearsed=rehearsed)
            if kind == "backward":
                behind.append(ahead.popleft())
                self._backward(step, behind[-1], boundary, splits=splits)
            if kind == "weights" or schedule != "ZeroBubble":
                yield self._completed(step, behind.popleft())
        if boundary is not None:
            with self._guard.collective("the pipeline", step):
                boundary.flush()

    def take_back(self) -> None:
        """What was rehearsed changed no parameter."""
        self._rehearsal.take_back()

    def _upcoming(self, step: int, work: Sequence[Work], number: int) -> list[MicroBatch]:
        """What this rank runs next, in this step and the one after it."""
        later = list(work[number + 1 :])
        if step < self._spec.max_steps and self._spec.batch.workers:
            later += self.work(step + 1)
        return [job.micro_batch for job in later]

    def _completing(self, step: int, *, last: bool, rehearsed: bool) -> None:
        """Before the pass that makes a micro-batch's last gradients."""
        if last and self._updates is not None and not rehearsed:
            self._open(step)
        sync_gradients(self._shards.model, last)
        if last and not rehearsed:
            self._sums.arm()

    def _completed(self, step: int, flight: Flight) -> Flight:
        """With the gradients that its backward left to do."""
        if flight.postponed is not None:
            self._mark("backward", step, flight.job.micro_batch.index)
            with self._guard.at("backward", step):
                flight.postponed.run()
        return flight

    def _forward(
        self, step: int, job: Work, upcoming: Sequence[MicroBatch], boundary: StageBoundary | None
    ) -> Flight:
        micro, shards, place = job.micro_batch, self._shards, self._place
        self._mark("forward", step, micro.index)
        batch = received = None
        if place.first or place.last or self._beside:
            with self._guard.at("the data set", step):
                loaded = self._loader.load(micro, upcoming)
                batch = placed(loaded, shards.device, DTYPE_OF[self._spec.precision])
        if boundary is not None and not place.first:
            with self._guard.collective("the pipeline", step):
                received = boundary.receive()
        with (
            self._randomness.micro_batch(step, micro.index) as draws,
            self._buffers.watch(micro.index, job.filler),
            divided_positions(self._here),
            self._guard.at("forward", step),
            self._units.micro_batch(),
            self._rehearsal.micro_batch(),
            compute_in(shards.device, self._spec.precision),
            cast_again(self._casts),
        ):
            output = self._call(None if batch is None else self._repeatable("inputs", batch), received)
            if place.last:
                with of_parts(shards.regions):
                    made, numbered = output, (step,) if self._takes_step else ()
                    with asking("task.loss"):
                        returned = self._repeatable("loss", output, batch, *numbered)
                    output, count = checked_loss(whole(returned))
                    if self.measured is not None and not job.filler:
                        with divided_positions(None):
                            self.measured.add(whole_output(made, place.context), batch)
                if not job.filler:
                    self._tally.add(output, count, micro)
        if boundary is not None and not place.last:
            with self._guard.collective("the pipeline", step):
                boundary.send(output)
        return Flight(job=job, draws=draws, received=received, output=output)

    def _check_trained(self, step: int) -> None:
        """Ranks that cut parameters come to a backward together, and, where code freezes parts while it
        trains, reduce the same gradients."""
        self._units.end()
        if self._freezes and self._place.data is not None:
            with self._guard.collective("comparing requires_grad", step):
                self._group.check()
                self.trained.check_equal(self._place.data, self._shards.device)

    def _backward(self, step: int, flight: Flight, boundary: StageBoundary | None, *, splits: bool) -> None:
        """A filler's backward starts from zero: every gradient it adds is zero, or not finite exactly where
        that of the counted run is."""
        micro, output, received = flight.job.micro_batch, flight.output, flight.received
        self._check_trained(step)
        self._mark("backward", step, micro.index)
        if self._place.last or boundary is None:
            start = 0.0 if flight.job.filler else self._loss_scale / self._spec.batch.global_size
            gradient = torch.full_like(output, start)
        elif output.requires_grad:
            with self._guard.collective("the pipeline", step):
                gradient = boundary.receive_gradient(output)
        else:
            return
        with (
            self.broken.backward(flight.job, self._tally),
            self._randomness.backward(flight.draws),
            self._buffers.watch(micro.index, filler=True),
            divided_positions(self._here),
            self._guard.at("backward", step),
            self._rehearsal.backward(),
            of_parts(self._shards.regions),
        ):
            if splits and received is not None and received.requires_grad:
                flight.postponed = backward_to_input(
                    output, gradient, received, self._sums.trainable.values()
                )
            else:
                output.backward(gradient)
        if boundary is not None and received is not None and received.requires_grad:
            with self._guard.collective("the pipeline", step):
                boundary.send_gradient(received)
