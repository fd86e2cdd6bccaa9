"""One optimizer step up to its vote: micro-batches, gradients, their sum, what all ranks agree on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from elastic_train.config import RunSpec
from elastic_train.data.loader import Loader
from elastic_train.data.order import MicroBatch, SampleOrder, ids_digest
from elastic_train.errors import ConfigError
from elastic_train.recovery.evidence import Vote
from elastic_train.train.buffers import ChangingBuffers
from elastic_train.train.build import DTYPE_OF
from elastic_train.train.collate import caller, collate, rows
from elastic_train.train.fragments import replica_of
from elastic_train.train.group import Group
from elastic_train.train.parallelize import compute_in, sync_gradients
from elastic_train.train.presence import Presence
from elastic_train.train.reduce import agree_on_presence, settle_absent, squares, sum_over_ranks
from elastic_train.train.rng import Randomness
from elastic_train.train.shards import Shards
from elastic_train.train.task import Task
from elastic_train.train.user_code import Border
from elastic_train.train.vote import Ballot

Mark = Callable[[str, int, int], None]
"""Told (phase, step, micro-batch) where a step enters a phase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One forward and backward. A filler repeats a micro-batch that another round or rank counts."""

    micro_batch: MicroBatch
    filler: bool


class Stepper:
    """Runs the steps of one generation on its shards."""

    def __init__(
        self,
        *,
        task: Task,
        spec: RunSpec,
        shards: Shards,
        group: Group,
        order: SampleOrder,
        loader: Loader,
        border: Border,
        mark: Mark,
    ) -> None:
        self._task, self._spec, self._shards, self._group = task, spec, shards, group
        self._order, self._loader, self._border, self._mark = order, loader, border, mark
        self._call = caller(shards.model)
        assert shards.blueprint is not None
        self._presence = Presence(shards.blueprint)
        self._trainable = {fqn: p for fqn, p in shards.parameters.items() if p.requires_grad}
        dp_index = shards.plan.mesh.dp_index(shards.rank)
        self._counted = {
            fqn: (replica_of(p)[0] if isinstance(p, DTensor) else dp_index) == 0
            for fqn, p in self._trainable.items()
        }
        self._randomness = Randomness(shards.model, seed=spec.batch.seed, device=shards.device)
        self._buffers = ChangingBuffers(shards.model, shards.plan.world_size)

    def gradients(self, step: int) -> Ballot:
        """The summed gradient of the step into `grad`, on all ranks; this rank's numbers for the vote.

        Loss and gradient are sums over the global batch, the gradient divided by the nominal count.
        """
        shards = self._shards
        shards.drop_gradients()
        self._presence.reset()
        work = self.work(step)
        losses = torch.zeros((), dtype=torch.float64, device=shards.device)
        count = 0.0
        for number, job in enumerate(work):
            self._group.check()
            sync_gradients(shards.model, number == len(work) - 1)
            upcoming = [later.micro_batch for later in work[number + 1 :]]
            loss, counted = self._micro_batch(step, job, upcoming)
            if not job.filler:
                losses += loss
                count += counted
        self._mark("reduce", step, -1)
        with self._border.collective("the reduction", step):
            present = self._presence.local(self._trainable)
            if shards.plan.world_size > 1:
                present = agree_on_presence(present, shards.device)
            settle_absent(self._trainable, present)
            if shards.plan.world_size > 1:
                sum_over_ranks(self._trainable)
            shards.pending_buffers = self._buffers.fold(len(self._order.micro_batches(step)))
            square_sum, finite = squares(self._trainable, self._counted)
        loss_sum = float(losses)
        finite = finite and math.isfinite(loss_sum)
        own = [i for job in work if not job.filler for i in job.micro_batch.real_ids]
        return Ballot(
            squares=square_sum,
            loss=loss_sum if math.isfinite(loss_sum) else 0.0,
            count=count,
            nonfinite=0.0 if finite else 1.0,
            ids=float(ids_digest(own)),
        )

    def vote(self, step: int, ballot: Ballot) -> Vote:
        """Sum the ranks' numbers. From here on this rank keeps the step's whole gradient."""
        shards = self._shards
        packed = ballot.packed(shards.device)
        with shards.lock:
            shards.reached = step
        self._mark("vote", step, -1)
        with self._border.collective("the vote", step):
            self._group.check()
            if shards.plan.world_size > 1:
                dist.all_reduce(packed)
        return Vote(step=step, values=tuple(packed.tolist()))

    def work(self, step: int) -> list[Work]:
        """What this rank runs: fillers first, then its micro-batches by ascending index.

        With sharded parameters every forward and backward communicates, so all ranks run equally many.
        """
        plan = self._shards.plan
        micro_batches = self._order.micro_batches(step)
        shares = [[i for i in share if i < len(micro_batches)] for share in plan.shares]
        own = shares[plan.mesh.dp_index(self._shards.rank)]
        rounds = max(map(len, shares)) if plan.mesh.dp_shard > 1 else len(own)
        fillers = [Work(micro_batch=micro_batches[own[0] if own else 0], filler=True)] * (rounds - len(own))
        return [*fillers, *(Work(micro_batch=micro_batches[i], filler=False) for i in own)]

    def _micro_batch(
        self, step: int, job: Work, upcoming: Sequence[MicroBatch]
    ) -> tuple[torch.Tensor, float]:
        """Forward and backward; the summed loss, detached, and its count.

        A filler's backward starts from zero: every gradient it adds is zero, or not finite exactly where
        that of the counted run is.
        """
        micro, spec, shards = job.micro_batch, self._spec, self._shards
        self._mark("forward", step, micro.index)
        with self._border.at("the data set", step):
            samples = self._loader.load(micro, upcoming)
            batch = collate(samples, shards.device, DTYPE_OF[spec.precision])
        with (
            self._randomness.micro_batch(step, micro.index),
            self._buffers.watch(micro.index, job.filler),
        ):
            with self._border.at("forward", step), compute_in(shards.device, spec.precision == "bf16"):
                output = self._call(self._task.inputs(batch))
                loss, count = self._task.loss(
                    rows(output, size=len(micro.ids), real=micro.real),
                    rows(batch, size=len(micro.ids), real=micro.real),
                )
            number = self._checked(loss, count)
            self._group.check()
            self._mark("backward", step, micro.index)
            with self._border.at("backward", step):
                start = 0.0 if job.filler else 1.0 / spec.batch.global_size
                loss.backward(torch.full_like(loss, start))
        return loss.detach(), number

    def _checked(self, loss: Any, count: Any) -> float:
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            what = (
                f"a tensor of shape {tuple(loss.shape)}"
                if isinstance(loss, torch.Tensor)
                else type(loss).__name__
            )
            raise ConfigError(
                field="task.loss",
                problem=f"its first value must be a summed loss that depends on the parameters, not {what}.",
            )
        return float(count)
