"""The learning rate schedule: stepped by committed steps, kept as plain numbers.

A scheduler's state mixes where it is (counters, last rates) with how it was set up (horizon, factors). Only
what its steps change is state; the rest comes from the code when a run is resumed, and differences are told.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from elastic_train.errors import ConfigError
from elastic_train.train.model.closures import cells_of
from elastic_train.train.model.value_prints import print_of

Leaf = int | float | str | bool | None


class Schedule:
    """A torch scheduler, and which entries of its state and of the optimizer's groups its steps change."""

    def __init__(
        self, scheduler: LRScheduler, optimizer: torch.optim.Optimizer, metric: str | None = None
    ) -> None:
        """`metric` is that of the evaluation whose results it is stepped by; None: by steps."""
        self._scheduler, self.metric = scheduler, metric
        self._optimizer = optimizer
        self._moving: set[str] = set()
        self._driven: set[str] = {"lr", "initial_lr"}

    @property
    def driven(self) -> frozenset[str]:
        """Hyperparameters that the schedule sets; they are restored, all others come from the code."""
        return frozenset(self._driven)

    def driven_by(self, document: Mapping[str, Any]) -> frozenset[str]:
        """Those, and what the same kind of schedule is known to have set before."""
        same = document["class"] == type(self._scheduler).__name__
        return self.driven | frozenset(document["driven"] if same else ())

    def step(self, loss: float) -> None:
        """After a committed step; `loss` is for schedulers that look at it."""
        if self.metric is None:
            self._step(loss)

    def measured(self, metrics: Mapping[str, float]) -> None:
        """After an evaluation."""
        if self.metric is not None:
            self._step(metrics[self.metric])

    def check_measured(self, names: Collection[str]) -> None:
        """ConfigError where an evaluation does not measure what the schedule is stepped by."""
        if self.metric is not None and self.metric not in names:
            raise ConfigError(
                field="task.schedule",
                problem=f"it is to be stepped by {self.metric!r}, which no evaluation measures.",
                remedy=f"There is {', '.join(map(repr, sorted(names)))}." if names else "Give evaluation().",
            )

    def _step(self, loss: float) -> None:
        state = dict(_leaves(self._scheduler.state_dict()))
        groups = [dict(group) for group in self._optimizer.param_groups]
        if isinstance(self._scheduler, ReduceLROnPlateau):
            self._scheduler.step(loss)
        else:
            self._scheduler.step()
        after = dict(_leaves(self._scheduler.state_dict()))
        self._moving |= {path for path, value in after.items() if path not in state or state[path] != value}
        for before, group in zip(groups, self._optimizer.param_groups, strict=True):
            self._driven |= {k for k in group if k != "params" and before.get(k) is not group[k]}

    def kept(self) -> dict[str, Any]:
        """A copy of the scheduler's whole state, to go back to."""
        return copy.deepcopy(self._scheduler.state_dict())

    def restore(self, kept: Mapping[str, Any], settings: Sequence[Mapping[str, Any]]) -> None:
        """Go back to where `kept` was taken. `settings` are the groups' hyperparameters there, as numbers."""
        self._scheduler.load_state_dict(copy.deepcopy(dict(kept)))
        for group, values in zip(self._optimizer.param_groups, settings, strict=True):
            for name in self._driven & values.keys():
                if isinstance(group[name], torch.Tensor):
                    group[name].fill_(values[name])
                else:
                    group[name] = values[name]

    def document(self) -> dict[str, Any]:
        """JSON values: what moves and what is set."""
        leaves = dict(_leaves(self._scheduler.state_dict()))
        return {
            "class": type(self._scheduler).__name__,
            "state": {path: leaves[path] for path in sorted(self._moving) if path in leaves},
            "settings": {path: value for path, value in sorted(leaves.items()) if path not in self._moving},
            "driven": sorted(self._driven),
        }

    def load(self, document: Mapping[str, Any]) -> list[str]:
        """Take the moving entries; a sentence for each setting that differs from the code's."""
        if document["class"] != type(self._scheduler).__name__:
            return [
                f"schedule: the run used {document['class']}, the code has {type(self._scheduler).__name__}, "
                "which starts anew"
            ]
        own = dict(_leaves(self._scheduler.state_dict()))
        notes = [
            f"schedule.{path}: the run used {value!r}, the code says {own[path]!r}, which is used"
            for path, value in document["settings"].items()
            if path in own and own[path] != value
        ]
        self._moving |= set(document["state"])
        self._driven |= set(document["driven"])
        state = self._scheduler.state_dict()
        for path, value in document["state"].items():
            state = _set(state, path.split("."), value)
        self._scheduler.load_state_dict(state)
        return notes

    def advance(self, steps: int) -> list[str]:
        """Go where the code's own schedule is after so many steps, unless losses matter to it."""
        name = type(self._scheduler).__name__
        if isinstance(self._scheduler, ReduceLROnPlateau) or self.metric is not None:
            return [f"schedule: {name} starts anew, without the losses before step {steps}"]
        with warnings.catch_warnings():  # torch warns of schedules that are ahead of their optimizer
            warnings.simplefilter("ignore", UserWarning)
            for _ in range(steps):
                self.step(0.0)
        return [f"schedule: the code's {name}, at step {steps}"]


def scheduler_of(made: object, optimizer: torch.optim.Optimizer) -> Schedule | None:
    """What `Task.schedule` returned, as a Schedule."""
    if made is None:
        return None
    metric = None
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], str):
        made, metric = made
    if not isinstance(made, LRScheduler):
        raise ConfigError(
            field="task.schedule",
            problem=f"returned {type(made).__name__}, not a torch learning rate scheduler.",
        )
    check_functions(made, "task.schedule")
    return Schedule(made, optimizer, metric)


def check_functions(schedule: object, field: str) -> None:
    """ConfigError for a function of the step that keeps state: torch saves that of objects alone."""
    functions = getattr(schedule, "lr_lambdas", ())
    for function in functions:
        if not hasattr(function, "__code__"):
            continue
        before = print_of(cells_of(function))
        first, second = function(0), function(0)
        if first != second or print_of(cells_of(function)) != before:
            raise ConfigError(
                field=field,
                problem=f"{getattr(function, '__qualname__', function)} of {type(schedule).__name__} gives "
                "another factor when it is called again: what it keeps would be lost whenever the group "
                "changes.",
                remedy="Compute the factor from the step alone, or give an object with __call__ that keeps "
                "what it needs in its attributes.",
            )
    for inner in getattr(schedule, "_schedulers", ()):
        check_functions(inner, field)


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Leaf]]:
    """Numbers, texts and flags of nested containers, by dotted path. Anything else is the code's."""
    if isinstance(value, dict):
        items = [(str(k), v) for k, v in value.items()]
    elif isinstance(value, list | tuple):
        items = [(str(i), v) for i, v in enumerate(value)]
    else:
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if value is None or isinstance(value, bool | int | float | str):
            yield path, value
        return
    for name, inner in items:
        yield from _leaves(inner, f"{path}.{name}" if path else name)


def _set(container: Any, path: list[str], value: Leaf) -> Any:
    """The container with one leaf replaced, types of its lists and tuples kept."""
    if not path:
        return torch.tensor(value, dtype=container.dtype) if isinstance(container, torch.Tensor) else value
    name, rest = path[0], path[1:]
    if isinstance(container, dict):
        by_text = {str(k): k for k in container}
        key = by_text.get(name, name)
        return {**container, key: _set(container.get(key), rest, value)}
    if isinstance(container, list | tuple):
        items = list(container)
        if not name.isdigit():
            return container
        items += [None] * (int(name) + 1 - len(items))  # it grew since
        items[int(name)] = _set(items[int(name)], rest, value)
        return type(container)(items)
    return value if not rest else container
