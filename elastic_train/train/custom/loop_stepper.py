"""Stepper of a user's loop: passes over micro-batches, backwards, and updates inside a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from elastic_train.data.order import MicroBatch
from elastic_train.errors import ConfigError
from elastic_train.train.collectives.gradient_reduction import local_gradient, settle_absent
from elastic_train.train.custom.agreed_update import Agreed
from elastic_train.train.custom.closure_evaluations import Evaluations, NotFinite
from elastic_train.train.custom.step_metrics import StepMetrics, Sums
from elastic_train.train.custom.update_images import Image
from elastic_train.train.declaration.declare import declared
from elastic_train.train.model.build import DTYPE_OF
from elastic_train.train.model.collate import placed
from elastic_train.train.model.lbfgs import LBFGS
from elastic_train.train.model.rng import derive, seed_all
from elastic_train.train.model.several_models import Optimizers, check_groups
from elastic_train.train.parallel.gradient_overlap import GradientSum
from elastic_train.train.parallel.parallelize import compute_in, sync_gradients
from elastic_train.train.state.shards import Shards
from elastic_train.train.step.micro_batch_work import Tally, Work
from elastic_train.train.step.rehearsal import check_unchanged, local, versions
from elastic_train.train.step.stepper import Stepper
from elastic_train.train.step.update import gradient_factor
from elastic_train.train.step.vote import StepStatistics
from elastic_train.train.step.workload import GroupContext, Workload

SETS = 8
"""Sets of parameters of which the memory for their sums is kept."""


class LoopStepper(Stepper):
    """One step is `begin`, any number of passes and updates, and `gradients`, which ends it for the vote."""

    OVERLAPS: ClassVar[bool] = False

    def __init__(
        self, workload: Workload, context: GroupContext, shards: Shards, *, fence: Callable[[], None]
    ) -> None:
        super().__init__(workload, context, shards, fence=fence)
        self._images: dict[str, Image] = {}
        self._sets: dict[frozenset[str], GradientSum] = {}  # by the names of parameters that are summed
        self._sums.choose(self._owned())
        self.job: Work | None = None
        self.number = 0  # the step under way

    @property
    def filling(self) -> bool:
        """Whether the micro-batch under way is one that another rank or round counts."""
        return self.job is not None and self.job.filler

    @property
    def updated(self) -> bool:
        """Whether the step under way changed an optimizer's parameters already."""
        return bool(self._images)

    def begin(self, step: int) -> None:
        self._shards.drop_gradients()
        self._sums.presence.reset()
        self._tally, self._counted_ids, self._with_counts = Tally(), set[int](), None
        self._spoken: StepStatistics | None = None  # of the last update inside the step
        self.number, self._passes, self._within = step, 0, False
        self._jobs = self.work(step)
        self._versions = versions(self._shards.parameters)
        self._marks = dict[str, tuple[int, int]]()  # of gradients, as the last backward left them
        check_groups(self._optimizers)
        self.adopt_buffers()
        self.job, self._images = None, {}
        self._changed = set[str]()  # parameters that were frozen or unfrozen within a micro-batch
        self._micro_batches = self._order.micro_batches(step)

    def adopt_buffers(self) -> None:
        """What the loop wrote into buffers is theirs, and what it put in their places is copied into them."""
        registered = self._shards.registered
        ours = registered.tensors if registered is not None else {}
        self._buffers.adopt({f: b for f, b in self._shards.buffers.items() if f not in ours})

    def _owned(self) -> dict[str, Any]:
        """The parameters of the optimizers, whether or not they are frozen now: a loop may unfreeze them."""
        parts = self._optimizers.parts.values()
        owned = {id(p) for part in parts for group in part.param_groups for p in group["params"]}
        return {fqn: p for fqn, p in self._shards.parameters.items() if id(p) in owned}

    def micro_batches(self) -> Iterator[Any]:
        """A pass: samples of this rank's micro-batches. Fillers come first."""
        self._complete()
        number, step = self._passes, self.number
        self._passes, self._within = number + 1, True
        for at, job in enumerate(self._jobs):
            self._group.check()
            micro = job.micro_batch
            sync_gradients(self._shards.model, at == len(self._jobs) - 1)
            self._mark("forward", step, micro.index)
            batch = self._samples(micro, at)
            # Each pass draws its own masks, and has its own statistics.
            index = micro.index + number * len(self._micro_batches)
            self.job = job
            before = self.trained.now() if self._several else {}
            try:
                with (
                    self._randomness.micro_batch(step, index),
                    self._buffers.watch(index, job.filler),
                    self._units.micro_batch(),
                    self._rehearsal.micro_batch(),
                    compute_in(self._shards.device, self._spec.precision),
                ):
                    yield batch
                now = self.trained.now() if self._several else {}
                self._changed |= {fqn for fqn in now if now[fqn] != before[fqn]}
            finally:
                self.job = None
        self._within = False

    def _agreed(self, own: Mapping[str, Any]) -> dict[str, bool]:
        """Which gradients exist on any rank. ConfigError, on all of them, where one froze something for a
        micro-batch and left it so: the others had other ones."""
        present = self._sums.presence.local(own)
        if self._shards.plan.world_size == 1:
            left = self._changed
        else:
            changed = {f"*{fqn}": fqn in self._changed for fqn in self._shards.parameters}
            agreed = self._sums.agreed_presence([*present, *changed], present | changed)
            left = {name[1:] for name in changed if agreed[name]}
            present = {fqn: agreed[fqn] for fqn in present}
        for fqn in sorted(left):
            raise ConfigError(
                field=f"model.{fqn}",
                problem="requires_grad was changed for a micro-batch and not changed back, so that what is "
                "trained depends on which micro-batches a rank had.",
                remedy="Freeze and unfreeze outside of the loop over the batch, or put it back in its body.",
            )
        return present

    def backward(self, loss: Any, count: Any, retain_graph: bool) -> None:
        job = self.job
        if job is None:
            raise ConfigError(
                field="step.backward",
                problem="there is no micro-batch.",
                remedy="Iterate the batch around it.",
            )
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise ConfigError(
                field="step.backward", problem="the loss must be one number that depends on the parameters."
            )
        if self._with_counts not in (None, count is not None):
            raise ConfigError(
                field="step.backward",
                problem="some losses of this update have a count and some have none.",
                remedy="Give all a count, for sums, or none, for means.",
            )
        self._with_counts = count is not None
        micro = job.micro_batch
        self._check_gradients()
        self._mark("backward", self.number, micro.index)
        self._check_trained(self.number)
        if count is None:
            loss = loss * len(micro.ids)
        start = 0.0 if job.filler else self._loss_scale / self._spec.batch.global_size
        with torch.autocast(self._shards.device.type, enabled=False), self._rehearsal.backward():
            loss.backward(torch.full_like(loss, start), retain_graph=retain_graph)
        self._marks = self._gradient_marks()
        if not job.filler:
            self._tally.loss = self._tally.loss + loss.detach().double()
            if count is not None:
                self._tally.count += float(count)
            elif micro.index not in self._counted_ids:
                self._tally.count += len(micro.ids)
                self._counted_ids.add(micro.index)

    def update(self, optimizer: torch.optim.Optimizer, fence: Callable[[], None]) -> Agreed:
        """Reduce and apply one optimizer's gradients, with a small all-reduce of its own."""
        name = self._name_of(optimizer, "step.update")
        step, spec, whole = self.number, self._spec, self._optimizers
        own = self._summed({name})
        agreed = self._agree_on(own)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        fence()
        self._images[name] = Image(whole, parameters)
        self._shards.pending.overflowed |= agreed.nonfinite > 0
        if not agreed.skipped:
            self._mark("update", step, -1)
            self._take_mean(optimizer, agreed)
            seed_all(derive(spec.batch.seed, f"update {name}", step), self._shards.device)
            with whole.only(name), self._shards.moving.watching(whole):
                whole.step()
        for parameter in parameters:
            parameter.grad = None
        self._forget()
        self._spoken = own
        return Agreed.of(agreed, self._spec)

    def closure(
        self, optimizer: torch.optim.Optimizer, compute: Callable[[], object], fence: Callable[[], None]
    ) -> Agreed:
        """As often as it likes. All ranks get the same numbers, so it decides the same on all.

        A loss or gradient that is not finite undoes the update, and skips the step.
        """
        name = self._name_of(optimizer, "step.closure")
        if not isinstance(optimizer, LBFGS):
            raise ConfigError(
                field="step.closure",
                problem=f"{type(optimizer).__name__} needs none, or keeps its state in ways of its own.",
                remedy="It is for torch.optim.LBFGS; call step.backward in the block for others.",
            )
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        fence()
        image = self._images[name] = Image(self._optimizers, parameters)
        self._mark("update", self.number, -1)
        seed_all(derive(self._spec.batch.seed, f"update {name}", self.number), self._shards.device)
        evaluations = Evaluations(self, {name}, parameters, compute)
        try:
            self._optimizers.step_one(name, evaluations)
        except NotFinite:
            image.put_back()
        for parameter in parameters:
            parameter.grad = None
        self._forget()
        self._spoken, agreed = evaluations.told
        self._shards.pending.overflowed |= agreed.nonfinite > 0
        return Agreed.of(agreed, self._spec)

    def evaluate(self, names: set[str]) -> tuple[StepStatistics, StepStatistics]:
        """What the backwards since the last update came to, on this rank and on all; `grad` has the mean."""
        own = self._summed(names)
        agreed = self._agree_on(own)
        self._forget()
        if not agreed.skipped:
            for name in names:
                self._take_mean(self._optimizers.parts[name], agreed)
        return own, agreed

    def _take_mean(self, optimizer: torch.optim.Optimizer, agreed: StepStatistics) -> None:
        factor = gradient_factor(agreed, self._spec) / self._loss_scale
        with torch.no_grad():
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                if parameter.grad is not None:
                    local_gradient(parameter).mul_(factor)

    def _name_of(self, optimizer: torch.optim.Optimizer, call: str) -> str:
        named = declared(self._shards.model).optimizers.items()
        name = next((n for n, own in named if own is optimizer), None)
        if name is None:
            raise ConfigError(field=call, problem="it is no optimizer of ctx.optimizer(...).")
        if name in self._images:
            raise ConfigError(field=call, problem=f"{name!r} was updated in this step before.")
        return name

    def _agree_on(self, own: StepStatistics) -> StepStatistics:
        packed = self.over_ranks(own.packed(self._shards.device), "an update")
        return StepStatistics.unpacked(tuple(packed.tolist()))

    def over_ranks(self, table: torch.Tensor, what: str) -> torch.Tensor:
        """Summed over all ranks, in place."""
        with self._guard.collective(what, self.number):
            self._group.check()
            if self._shards.plan.world_size > 1:
                self._group.sum(table)
        return table

    def _gradients(self, step: int) -> StepStatistics:
        """What the optimizers that were not updated inside the step have to apply."""
        if not self._passes:
            raise ConfigError(
                field="ctx.step", problem="the batch was not iterated.", remedy="Iterate it inside the block."
            )
        updated = {
            id(p)
            for name in self._images
            for g in self._optimizers.parts[name].param_groups
            for p in g["params"]
        }
        check_unchanged(self._versions, self._shards.parameters, self._several, updated)
        due = set(self._optimizers.parts) - self._images.keys()
        backward = self._with_counts is not None
        statistics = self._summed(due)
        if self._images and not backward and self._spoken is not None:
            statistics = replace(self._spoken, squares=statistics.squares)
        self._forget()
        total = len(self._micro_batches) * self._passes
        self._shards.pending.buffers = self._buffers.fold(total)
        return statistics

    def means(self, sums: Mapping[str, Sums], known: list[str] | None = None) -> dict[str, float]:
        """Of the user's metrics over the global batch. With the names that all ranks `known` so far, others
        may be among them."""
        metrics = StepMetrics(self._shards.device, self.over_ranks, self.names_of_all)
        return metrics.means(sums) if known is None else metrics.means_of_any(sums, known)

    def names_of_all(self, own: list[str]) -> list[list[str]]:
        """What each rank names."""
        found = [own] * self._shards.plan.world_size
        if len(found) > 1:
            with self._guard.collective("agreeing on metrics", self.number):
                dist.all_gather_object(found, own)
        return found

    def put_back(self) -> None:
        """The step was broken off: undo what was updated inside it."""
        for image in self._images.values():
            image.put_back()
        if self._images:
            moving = self._shards.moving
            moving.restore(self._shards.optimizer, moving.document(), self._shards.device)
        self._images = {}

    def done(self) -> None:
        """The step is committed."""
        self._images = {}

    @property
    def _optimizers(self) -> Optimizers:
        assert isinstance(self._shards.optimizer, Optimizers)
        return self._shards.optimizer

    def _samples(self, micro: MicroBatch, at: int) -> Any:
        upcoming = self._upcoming(self.number, self._jobs, at)
        with self._guard.at("the data set", self.number):
            loaded = self._loader.load(micro, upcoming)
            return placed(loaded, self._shards.device, DTYPE_OF[self._spec.precision])

    def _summed(self, names: set[str]) -> StepStatistics:
        """The gradients of some optimizers summed over the ranks, and none for the others."""
        self._complete()
        self._check_gradients()
        step = self.number
        chosen = {id(p) for n in names for g in self._optimizers.parts[n].param_groups for p in g["params"]}
        own = {fqn: p for fqn, p in self._sums.trainable.items() if id(p) in chosen}
        for fqn, parameter in self._sums.trainable.items():
            if fqn not in own:
                parameter.grad = None
        self._mark("reduce", step, -1)
        with self._guard.collective("the reduction", step):
            present = self._agreed(own)
            there = {fqn: p for fqn, p in own.items() if present[fqn]}
            if self._place.data is not None and there:
                gradients = self._sum_of(there, self._place.data)
                gradients.start_rest()
                gradients.finish()
            settle_absent(own, present)
            square_sum, finite = self._sums.squares(own)
        ids = [i for job in self._jobs if not job.filler for i in job.micro_batch.ids]
        self._tally.ids = ids
        reported = self._forwards()
        square_sum /= self._loss_scale**2
        return replace(reported, squares=square_sum, nonfinite=reported.nonfinite or float(not finite))

    def _sum_of(self, parameters: Mapping[str, Any], group: dist.ProcessGroup) -> GradientSum:
        names = frozenset(parameters)
        if names not in self._sets:
            if len(self._sets) == SETS:
                del self._sets[next(iter(self._sets))]
            self._sets[names] = GradientSum(parameters, group, early=False)
        return self._sets[names]

    def _forget(self) -> None:
        """What belonged to the last update. Gathered tensors are older than it."""
        self._sums.presence.reset()
        self._tally, self._counted_ids, self._with_counts = Tally(), set(), None
        self._marks = {}
        for module in self._shards.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _gradient_marks(self) -> dict[str, tuple[int, int]]:
        """What every write to a gradient changes."""
        return {
            fqn: (id(parameter.grad), parameter.grad._version + local(parameter.grad)._version)
            for fqn, parameter in self._sums.trainable.items()
            if parameter.grad is not None
        }

    def _check_gradients(self) -> None:
        """ConfigError where the loop changed a gradient: it is this rank's share. It may drop one."""
        for fqn, mark in self._gradient_marks().items():
            if self._marks.get(fqn) != mark:
                raise ConfigError(
                    field=f"model.{fqn}",
                    problem="its gradient was changed inside the step, and not by step.backward: there it is "
                    "that of some samples, and not yet of the global batch.",
                    remedy="Change it in a hook before the optimizer's step (register_step_pre_hook), where "
                    "it is that of the mean over the global batch; clip by ElasticTrainer(clip_norm=...).",
                )

    def _complete(self) -> None:
        if self._within:
            raise ConfigError(
                field="batch",
                problem="a pass over it was left early, and ranks may have unlike many micro-batches.",
                remedy="Iterate every pass to its end.",
            )
