"""The optimizer in backward: each parameter is updated as soon as its reduced gradient is there.

What a step's updates need to know of all ranks, its count of tokens, is agreed on before its last backward:
the opening. Nothing else is global, so clipping is not possible. The vote stays what commits the step. A loss
that isn't finite shows at the opening, and then nothing is updated; a gradient that isn't finite shows at the
vote, and what was updated is undone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from elastic_train.config import RunSpec
from elastic_train.errors import ConfigError
from elastic_train.recovery.evidence import Vote
from elastic_train.train.collectives.gradient_reduction import aligned, local_gradient
from elastic_train.train.model.accumulated_gradients import when_accumulated
from elastic_train.train.parallel.gradient_presence import Presence
from elastic_train.train.state.shards import Shards
from elastic_train.train.step.update import gradient_factor, is_finite, update
from elastic_train.train.step.vote import StepStatistics
from elastic_train.train.undo.partial_update import Progressive
from elastic_train.train.undo.undo_step import WHOLE, refusal, settings_of

OFF = "Leave optimizer_in_backward off."


class InBackward:
    """The updates of one generation. `mark` gets the number of parameters ahead after each."""

    def __init__(
        self,
        shards: Shards,
        spec: RunSpec,
        presence: Presence,
        *,
        buffers: Iterable[str],
        mark: Callable[[int, int], None],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`buffers` are those that each step changes. An optimizer that can't be undone is refused. `check`
        raises once the group is broken.
        """
        _check(shards)
        self._check_group = check
        self._shards, self._spec, self._presence, self._mark = shards, spec, presence, mark
        self._trainable = {fqn: p for fqn, p in shards.parameters.items() if p.requires_grad}
        self._names = (*self._trainable, *buffers)
        self._groups = {fqn: number for number, fqns in enumerate(shards.whole.groups) for fqn in fqns}
        # The gradients of these are summed over stages, or over tp, after the backward.
        self._late = {fqn for fqn in self._trainable if len(shards.place.stages_of(fqn)) > 1}
        self._late |= self._trainable.keys() & (shards.regions.alone if shards.regions else ())
        self._armed = False

    def watch(self, fqns: Iterable[str]) -> None:
        """Parameters whose gradients are whole when their backward has made them."""
        for fqn in fqns:
            when_accumulated(self._trainable[fqn], self.completed, fqn)

    def begin(self, step: int, opening: Vote) -> None:
        """The next backward is the step's last on this rank."""
        shards = self._shards
        shards.pending.progressive = Progressive(
            step=step,
            opening=opening,
            groups=self._groups,
            settings=settings_of(shards.optimizer),
            applied=shards.applied,
            schedule=shards.schedule.kept() if shards.schedule is not None else None,
            behind=set(self._names),
        )
        self._armed = True

    @property
    def under_way(self) -> bool:
        return self._armed

    def ready(self, fqns: Iterable[str]) -> None:
        """Gradients that this rank's backward had a part in are reduced."""
        made = self._shards.pending.progressive
        if not self._armed or made is None:
            return
        found = [fqn for fqn in fqns if fqn not in self._late]
        for fqn in found:
            if fqn in made.ahead:
                raise ConfigError(
                    field="task.model",
                    problem=f"the gradient of {fqn!r} grew after the backward had completed it.",
                    remedy=f"Use torch.utils.checkpoint with use_reentrant=False. {OFF}",
                )
            parameter = self._trainable[fqn]
            if parameter.grad is not None:
                parameter.grad = aligned(parameter, parameter.grad)
        update(self._shards, found, self._spec, self._check_group)
        self._mark(made.step, len(made.ahead))

    def rest(self) -> None:
        """Every gradient is reduced, and it is known which parameters have none: update what is left."""
        self._armed = False
        made = self._shards.pending.progressive
        if made is None:
            return
        rest = [fqn for fqn in self._trainable if fqn not in made.ahead]
        update(self._shards, rest, self._spec, self._check_group)
        for fqn in self._shards.pending.buffers:
            made.reduced(fqn)

    def broken(self, reduced: Iterable[str]) -> None:
        """The step goes no further. The gradients of `reduced` came in time."""
        self._armed = False
        made = self._shards.pending.progressive
        if made is None or self._shards.step is None:
            return
        for fqn in reduced:
            parameter = self._trainable[fqn]
            if fqn in made.behind and parameter.grad is not None and is_finite(local_gradient(parameter)):
                made.reduced(fqn)

    def unscaled(self, squares: float) -> float:
        """The sum of squares of the gradients as they were reduced, from that of those that were applied."""
        made = self._shards.pending.progressive
        if made is None:
            return squares
        return squares / gradient_factor(StepStatistics.unpacked(made.opening.values), self._spec) ** 2

    def completed(self, fqn: str) -> None:
        """The backward has a parameter's whole gradient, if this rank had a part in it."""
        if self._armed and self._presence.local({fqn: self._trainable[fqn]})[fqn]:
            self.ready([fqn])


def _check(shards: Shards) -> None:
    """Refuse by name what could not be undone."""
    name = type(shards.optimizer).__name__
    why = refusal(shards.optimizer)
    if why is None:
        why = next((w for fqn, p in shards.parameters.items() if (w := _why_not(name, fqn, p))), None)
    if why is not None:
        raise ConfigError(
            field="optimizer_in_backward",
            problem=f"a step of {name} cannot be undone, which this needs: {why}.",
            remedy=f"Choose another optimizer, or keep the update after the vote. {OFF}",
        )


def _why_not(name: str, fqn: str, parameter: nn.Parameter) -> str | None:
    if parameter.requires_grad and parameter.dtype not in (torch.float32, torch.float64):
        return f"{fqn!r} is {str(parameter.dtype).removeprefix('torch.')}, which has too few digits"
    if name in WHOLE and isinstance(parameter, DTensor):
        sizes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
        if any(isinstance(placement, Shard) and size > 1 for placement, size in sizes):
            return f"it looks at whole tensors, and {fqn!r} is cut"
    return None


def opening(step: int, summed: StepStatistics) -> Vote | None:
    """The outcome of an opening, as a roll forward takes it; None where the step will be skipped."""
    if summed.skipped:
        return None
    return Vote(step=step, values=replace(summed, squares=-1.0).values)
