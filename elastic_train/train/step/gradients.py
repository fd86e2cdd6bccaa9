"""Gradient editing: a task's access to the reduced gradient before the update.

What is read of it is of the whole model under every plan, and what is drawn for it depends on the step and on
the tensor's name alone. All ranks edit together: the user's code must call the same methods on each.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import torch.distributed as dist

from elastic_train.config import RunSpec
from elastic_train.errors import ConfigError
from elastic_train.train.collectives.gradient_reduction import local_gradient, squares
from elastic_train.train.model import seeded_sections
from elastic_train.train.state.live_fragments import TensorPart, gradient_parts, replica_of
from elastic_train.train.state.shards import Shards
from elastic_train.train.step.update import CLIP_EPSILON, unscaling
from elastic_train.train.step.vote import StepStatistics
from elastic_train.train.task import Task
from elastic_train.train.user_code_guard import UserCodeGuard

Edit = Callable[[str, torch.Tensor], torch.Tensor | None]
"""From a name and a whole gradient to another one; None where it was changed in place."""


class Gradients:
    """The gradient of the mean loss over the global batch, clipped to `clip_norm` where that is set.

    `pattern` is of names of parameters, as in `blocks.*.weight`.
    """

    def __init__(self, shards: Shards, step: int, seed: int) -> None:
        self.step = step
        self._shards, self._seed = shards, seed
        present = torch.tensor(
            [
                fqn in shards.parameters and shards.parameters[fqn].grad is not None
                for fqn in shards.whole.trainable
            ],
            dtype=torch.float32,
            device=shards.device,
        )
        if shards.plan.world_size > 1:
            dist.all_reduce(present, dist.ReduceOp.MAX)
        self.names = tuple(
            n for n, there in zip(shards.whole.trainable, present.tolist(), strict=True) if there
        )

    def norm(self, pattern: str = "*") -> float:
        """The 2-norm of all gradients together whose names match."""
        own = {fqn: self._shards.parameters[fqn] for fqn in self._here(pattern)}
        place = self._shards.place
        counted = {fqn: replica_of(fqn, p, place).index == 0 for fqn, p in own.items()}
        found, finite = squares(own, counted)
        total = torch.tensor(
            [found if finite else float("nan")], dtype=torch.float64, device=self._shards.device
        )
        if self._shards.plan.world_size > 1:
            dist.all_reduce(total)
        return float(total.sqrt())

    def clip_norm_(self, limit: float, pattern: str = "*") -> float:
        """Scale them down to a norm of `limit` at most, as torch's clip_grad_norm_; the norm before."""
        norm = self.norm(pattern)
        self.scale_(min(1.0, limit / (norm + CLIP_EPSILON)), pattern)
        return norm

    def clip_value_(self, limit: float, pattern: str = "*") -> None:
        """Cut each element to -limit .. limit, as torch's clip_grad_value_."""
        for fqn in self._here(pattern):
            self._local(fqn).clamp_(-limit, limit)

    def scale_(self, factor: float, pattern: str = "*") -> None:
        if factor != 1.0:
            for fqn in self._here(pattern):
                self._local(fqn).mul_(factor)

    def add_noise_(self, std: float, pattern: str = "*") -> None:
        """Add normal noise, the same under every plan."""

        def noisy(_: str, gradient: torch.Tensor) -> torch.Tensor:
            return gradient.add_(torch.randn_like(gradient), alpha=std)

        self.edit_(noisy, pattern)

    def edit_(self, edit: Edit, pattern: str = "*") -> None:
        """Give each gradient to `edit`, whole, one after the other, and take what it returns.

        Where tensors are divided each is put together on every rank. What `edit` draws from the global
        generators is seeded by the step and the name.
        """
        for fqn in self._matching(pattern):
            whole = self._whole(fqn)
            with seeded_sections.gradient(self._seed, self.step, fqn, self._shards.device):
                edited = edit(fqn, whole)
            edited = whole if edited is None else edited
            if edited.shape != whole.shape:
                raise ConfigError(
                    field="task.gradients",
                    problem=f"the edited gradient of {fqn!r} has shape {tuple(edited.shape)}, not "
                    f"{tuple(whole.shape)}.",
                )
            if fqn in self._shards.parameters:
                for part in self._parts(fqn):
                    part.view.copy_(edited[part.box.slices])

    def _whole(self, fqn: str) -> torch.Tensor:
        shards = self._shards
        mine = shards.parameters.get(fqn)
        # In float64, which adds nothing to any dtype: a stage without the tensor does not know its own.
        whole = torch.zeros(shards.whole.shapes[fqn], dtype=torch.float64, device=shards.device)
        alike = shards.plan.mesh.dp_replicate == shards.plan.world_size
        if mine is not None and (alike or replica_of(fqn, mine, shards.place).index == 0):
            for part in self._parts(fqn):
                whole[part.box.slices].copy_(part.view)
        if not alike:
            dist.all_reduce(whole)
        return whole if mine is None else whole.to(mine.dtype)

    def _parts(self, fqn: str) -> Iterator[TensorPart]:
        gradient = self._shards.parameters[fqn].grad
        assert gradient is not None
        return gradient_parts(self._shards, fqn, gradient)

    def _matching(self, pattern: str) -> list[str]:
        found = [fqn for fqn in self.names if fnmatch.fnmatchcase(fqn, pattern)]
        if not found and not any(fnmatch.fnmatchcase(fqn, pattern) for fqn in self._shards.whole.trainable):
            raise ConfigError(field="task.gradients", problem=f"no trained parameter matches {pattern!r}.")
        return found

    def _here(self, pattern: str) -> list[str]:
        return [fqn for fqn in self._matching(pattern) if fqn in self._shards.parameters]

    def _local(self, fqn: str) -> torch.Tensor:
        return local_gradient(self._shards.parameters[fqn])


def edits(task: Task) -> bool:
    """Whether a task edits gradients."""
    return type(task).gradients is not Task.gradients


def check_edits(task: Task, spec: RunSpec) -> None:
    if edits(task) and spec.optimizer_in_backward:
        raise ConfigError(
            field="optimizer_in_backward",
            problem="the task edits gradients, and parameters would be updated before all of them are there.",
            remedy="Leave optimizer_in_backward off, or remove gradients() from the task.",
        )


def edited(
    task: Task, shards: Shards, step: int, statistics: StepStatistics, spec: RunSpec, guard: UserCodeGuard
) -> StepStatistics:
    """Let a task edit the reduced gradient, of which the mean is taken first; the statistics for the vote.

    All ranks call it together. Its norm in the statistics stays that of before.
    """
    agreed = statistics.packed(shards.device)
    with guard.collective("the mean", step):
        if shards.plan.world_size > 1:
            dist.all_reduce(agreed)
        outcome = StepStatistics.unpacked(tuple(agreed.tolist()))
    if outcome.skipped:
        return statistics
    own = {fqn: p for fqn, p in shards.parameters.items() if p.grad is not None}
    with torch.no_grad(), guard.at("gradients", step):
        for parameter in own.values():
            local_gradient(parameter).mul_(unscaling(shards, outcome, spec))
        task.gradients(Gradients(shards, step, spec.batch.seed))
        _, finite = squares(own, dict.fromkeys(own, True))
    shards.pending.scaled = True
    return replace(statistics, nonfinite=statistics.nonfinite or float(not finite))
