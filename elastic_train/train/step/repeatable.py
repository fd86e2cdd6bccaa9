"""Whether a task's own functions give the same when they are called again: what they keep would be lost.

The first time they are called, they are called twice, with the same batch and random numbers. A moving mean
of losses, a counter, a generator: whatever then differs depends on which rank ran what, and would begin anew
whenever the group changes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from elastic_train.errors import ConfigError
from elastic_train.train.model.value_prints import print_of
from elastic_train.train.step.rehearsal import again, kept_alike, leaves_of
from elastic_train.train.task import Task

LARGE = 4096
"""Entries of a container above which it is told by its identity and length."""


class Repeatable:
    """Of one task, at the start of a run; elsewhere functions are just called."""

    def __init__(
        self,
        task: Task,
        rehearsing: Callable[[], AbstractContextManager[None]],
        device: torch.device,
        *,
        active: bool,
    ) -> None:
        self._task, self._rehearsing, self._device = task, rehearsing, device
        self._due = {"inputs", "loss"} if active else set[str]()

    def __call__(self, name: str, *args: Any) -> Any:
        """What the task's function of this name returns."""
        function = getattr(self._task, name)
        if name not in self._due:
            return function(*args)
        self._due.remove(name)
        with self._rehearsing():
            first = leaves_of(function(*pytree.tree_map_only(torch.Tensor, again, args)))
        before = kept_by(self._task)
        found = function(*args)
        after = kept_by(self._task)
        for attribute in sorted(before.keys() | after.keys()):
            if before.get(attribute) != after.get(attribute):
                raise ConfigError(
                    field=f"task.{name}",
                    problem=f"each call changes the task's attribute {attribute!r}, which depends on what "
                    "ran before: it would differ between ranks, and begin anew whenever the group changes.",
                    remedy="Compute it from the samples. What lasts belongs into the model, as a parameter, "
                    "or into a loop, by ctx.register(...).",
                )
        if not kept_alike(first, leaves_of(found), self._device):
            raise ConfigError(
                field=f"task.{name}",
                problem="it gives another value for the same samples and random numbers when it is called "
                "again: something is changed or drawn there that the run does not know.",
                remedy="Draw from the generators of torch, numpy or random, which are seeded for each "
                "micro-batch, and keep nothing from one call to the next.",
            )
        return found


def kept_by(task: Task) -> dict[str, Hashable]:
    """Of everything that a task holds, by attribute."""
    return {name: _print(value) for name, value in vars(task).items()}


def _print(value: Any) -> Hashable:
    if isinstance(value, nn.Module):
        own = (*value.parameters(), *value.buffers())
        return "module", id(value), tuple((id(tensor), tensor._version) for tensor in own)
    if isinstance(value, list | tuple | dict | set) and len(value) > LARGE:
        return "large", id(value), len(value)
    if hasattr(value, "__getitem__") and not isinstance(
        value, list | tuple | dict | str | bytes | torch.Tensor
    ):
        return "id", id(value)  # a data set
    return print_of(value)
