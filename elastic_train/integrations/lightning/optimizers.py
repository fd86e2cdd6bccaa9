"""What `configure_optimizers` returned, in any of its shapes, as optimizers and schedules."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from elastic_train.errors import ConfigError

FIELD = "configure_optimizers"


@dataclass(slots=True, kw_only=True, eq=False)
class Schedule:
    """A scheduler, and when it is stepped. `monitor` is what ReduceLROnPlateau looks at."""

    scheduler: Any
    interval: str = "epoch"
    frequency: int = 1
    reduce_on_plateau: bool = False
    monitor: str | None = None
    strict: bool = True
    name: str | None = None

    def __post_init__(self) -> None:
        if self.interval not in ("step", "epoch"):
            raise ConfigError(
                field=f"{FIELD}: interval", problem=f"must be 'step' or 'epoch', got {self.interval!r}."
            )
        if not isinstance(self.frequency, int) or self.frequency < 1:
            raise ConfigError(
                field=f"{FIELD}: frequency", problem=f"must be 1 or more, got {self.frequency!r}."
            )
        if self.reduce_on_plateau and not self.monitor:
            raise ConfigError(
                field=f"{FIELD}: monitor",
                problem="ReduceLROnPlateau needs the name of a metric.",
                remedy='Return "lr_scheduler": {"scheduler": ..., "monitor": "val_loss"}.',
            )

    def due(self, interval: str, count: int, *, plateau: bool) -> bool:
        """Whether it is stepped after so many batches, or epochs."""
        return self.interval == interval and self.reduce_on_plateau == plateau and count % self.frequency == 0


@dataclass(slots=True, kw_only=True, eq=False)
class Configured:
    """Of one build of the module. `begin` is the state in which each scheduler was made."""

    optimizers: list[torch.optim.Optimizer]
    schedules: list[Schedule]
    begin: list[Any] = field(default_factory=list[Any])

    def __post_init__(self) -> None:
        self.begin = [copy.deepcopy(each.scheduler.state_dict()) for each in self.schedules]

    def rewind(self) -> None:
        """Schedulers as they were made."""
        for each, state in zip(self.schedules, self.begin, strict=True):
            each.scheduler.load_state_dict(copy.deepcopy(state))


def configured(returned: Any, *, automatic: bool) -> Configured:
    """ConfigError where it is none of the shapes that Lightning knows."""
    optimizers, given, monitor = _shapes(returned)
    if automatic and len(optimizers) > 1:
        raise ConfigError(
            field=FIELD,
            problem=f"returned {len(optimizers)} optimizers with automatic optimization.",
            remedy="Set automatic_optimization = False and step them in training_step, as in Lightning.",
        )
    schedules = [_schedule(each, monitor, automatic=automatic) for each in given]
    for each in schedules:
        if not any(_stepped(each.scheduler) is optimizer for optimizer in optimizers):
            raise ConfigError(
                field=FIELD, problem="a scheduler is of an optimizer that was not returned with it."
            )
    return Configured(optimizers=optimizers, schedules=schedules)


def _stepped(scheduler: Any) -> Any:
    return getattr(scheduler, "optimizer", None) or getattr(scheduler, "_optimizer", None)


def _shapes(returned: Any) -> tuple[list[torch.optim.Optimizer], list[Any], str | None]:
    kind = torch.optim.Optimizer
    if isinstance(returned, kind):
        return [returned], [], None
    if isinstance(returned, Mapping):
        return [_named(returned)], _scheduled(returned), returned.get("monitor")
    if isinstance(returned, list | tuple) and returned:
        if len(returned) == 2 and isinstance(returned[0], list):
            schedulers = returned[1] if isinstance(returned[1], list) else [returned[1]]
            if all(isinstance(each, kind) for each in returned[0]):
                return list(returned[0]), list(schedulers), None
        if all(isinstance(each, Mapping) for each in returned):
            given: list[Any] = []
            for each in returned:
                for scheduler in _scheduled(each):
                    said = dict(scheduler) if isinstance(scheduler, Mapping) else {"scheduler": scheduler}
                    given.append({"monitor": each.get("monitor"), **said})
            return [_named(each) for each in returned], given, None
        if all(isinstance(each, kind) for each in returned):
            return list(returned), [], None
    raise ConfigError(
        field=FIELD,
        problem=f"returned {type(returned).__name__}, which is none of the shapes that Lightning knows.",
        remedy='Return an optimizer, a list, two lists, or {"optimizer": ..., "lr_scheduler": ...}.',
    )


def _named(said: Mapping[str, Any]) -> torch.optim.Optimizer:
    optimizer = said.get("optimizer")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(field=FIELD, problem="returned a dict without an 'optimizer'.")
    return optimizer


def _scheduled(said: Mapping[str, Any]) -> list[Any]:
    return [] if said.get("lr_scheduler") is None else [said["lr_scheduler"]]


def _schedule(given: Any, monitor: str | None, *, automatic: bool) -> Schedule:
    said = dict(given) if isinstance(given, Mapping) else {"scheduler": given}
    unknown = sorted(said.keys() - {each.name for each in fields(Schedule)})
    if unknown:
        raise ConfigError(field=f"{FIELD}: lr_scheduler", problem=f"nobody reads {', '.join(unknown)}.")
    if "scheduler" not in said:
        raise ConfigError(field=f"{FIELD}: lr_scheduler", problem="has no 'scheduler'.")
    plateau = isinstance(said["scheduler"], ReduceLROnPlateau) and automatic
    said["reduce_on_plateau"] = bool(said.get("reduce_on_plateau", plateau)) and automatic
    if said.get("monitor") is None:
        said["monitor"] = monitor
    return Schedule(**said)
