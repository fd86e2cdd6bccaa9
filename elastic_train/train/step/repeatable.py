"""Whether a task's own functions give the same when they are called again: what they keep would be lost.

The first time they are called, they are called twice, with the same batch and random numbers. A moving mean
of losses, a counter, a generator: whatever then differs depends on which rank ran what, and would begin anew
whenever the group changes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from elastic_train.errors import ConfigError
from elastic_train.train.declaration.loop_task import LoopTask
from elastic_train.train.model.surroundings import Kept, Surroundings
from elastic_train.train.model.value_prints import print_of
from elastic_train.train.step.elsewhere import check_elsewhere
from elastic_train.train.step.rehearsal import again, kept_alike, leaves_of
from elastic_train.train.step.repeated_calls import depends, with_others
from elastic_train.train.task import Task


class Repeatable:
    """Of one task, at the start of a run; elsewhere functions are just called."""

    def __init__(
        self,
        task: Task,
        rehearsing: Callable[[], AbstractContextManager[None]],
        device: torch.device,
        *,
        surroundings: Surroundings | None,
        several: bool,
    ) -> None:
        """`surroundings` are of the job's code; None: nothing is looked at. `several`: whether more than one
        rank may ever run the task."""
        self._several = several
        self._task, self._rehearsing, self._device = task, rehearsing, device
        self._surroundings = surroundings or Surroundings()
        self._due = {"inputs", "loss"} if surroundings is not None else set[str]()

    def __call__(self, name: str, *args: Any) -> Any:
        """What the task's function of this name returns."""
        function = getattr(self._task, name)
        if name not in self._due:
            return function(*args)
        self._due.remove(name)

        def call(others: bool) -> list[torch.Tensor]:
            with self._rehearsing():
                given = with_others(args) if others else pytree.tree_map_only(torch.Tensor, again, args)
                return leaves_of(function(*given))

        start, kept = self._prints(), self._kept()
        first = call(False)
        before = self._prints()
        alike = partial(kept_alike, device=self._device)
        lasting = depends(start, before, kept, first=first, call=call, prints=self._prints, alike=alike)
        if self._several:
            check_elsewhere(
                self._surroundings,
                first,
                partial(call, False),
                alike,
                field=f"task.{name}",
                what="it",
            )
        found = function(*args)
        after = self._prints()
        changed = [
            place for place in sorted(before.keys() | after.keys()) if before.get(place) != after.get(place)
        ]
        for place in (lasting, *changed):
            if place is not None:
                raise ConfigError(
                    field=f"task.{name}",
                    problem=f"each call changes {place}, which depends on what ran before: it would differ "
                    "between ranks, and begin anew whenever the group changes.",
                    remedy="Compute it from the samples. What lasts belongs into the model, as a parameter, "
                    "or into a loop, by ctx.register(...). To look at losses, write them and read them "
                    "elsewhere: what no function of the job reads may be kept.",
                )
        if not alike(first, leaves_of(found)):
            raise ConfigError(
                field=f"task.{name}",
                problem="it gives another value for the same samples and random numbers when it is called "
                "again: something is changed or drawn there that the run does not know.",
                remedy="Draw from the generators of torch, numpy or random, which are seeded for each "
                "micro-batch, and keep nothing from one call to the next.",
            )
        return found

    def _prints(self) -> dict[str, Hashable]:
        """Of everything that a task holds and its code reads, and of what surrounds it."""
        own = {
            f"the task's attribute {name!r}": _print(value)
            for name, value in vars(self._task).items()
            if not self._surroundings.unread(name)
        }
        return own | self._surroundings.prints()

    def _kept(self) -> Kept:
        kept = Kept(self._surroundings)
        kept.hold(vars(self._task), lambda _: True)
        return kept


def surroundings_of(task: Task, model: nn.Module) -> Surroundings:
    """What the code of a task, or a loop, and of its model keeps outside of both."""
    code = task.loop if isinstance(task, LoopTask) else task
    return Surroundings.of([code, *model.modules()])


def _print(value: Any) -> Hashable:
    if isinstance(value, nn.Module):
        own = (*value.parameters(), *value.buffers())
        return "module", id(value), tuple((id(tensor), tensor._version) for tensor in own)
    if hasattr(value, "__getitem__") and not isinstance(
        value, list | tuple | dict | str | bytes | torch.Tensor | np.ndarray
    ):
        return "id", id(value)  # a data set
    return print_of(value, content=True)
