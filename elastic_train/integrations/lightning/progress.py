"""What a fit keeps from step to step beside its model: means of an epoch, and how long nothing got better."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from elastic_train.errors import ConfigError
from elastic_train.integrations.lightning.logged import Value


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping:
    """Lightning's EarlyStopping, as data."""

    monitor: str
    min_delta: float
    patience: int
    mode: str
    strict: bool
    check_finite: bool
    stopping_threshold: float | None
    divergence_threshold: float | None
    each_epoch: bool  # looked at where an epoch ends, else after each validation

    def better(self, value: float, than: float) -> bool:
        return value < than if self.mode == "min" else value > than

    @property
    def worst(self) -> float:
        return math.inf if self.mode == "min" else -math.inf


@dataclass(slots=True, kw_only=True, eq=False)
class Progress:
    """Registered with the run. `metrics` are the newest of each name."""

    stopping: tuple[Stopping, ...] = ()
    sums: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    waits: list[list[float]] = field(
        default_factory=list[list[float]]
    )  # of each: the best, and how often not

    def __post_init__(self) -> None:
        self.waits = [[each.worst, 0.0] for each in self.stopping]

    def add(self, name: str, value: float, weight: float) -> None:
        """To the mean of the epoch."""
        total, count = self.sums.get(name, [0.0, 0.0])
        self.sums[name] = [total + value * weight, count + weight]

    def means(self) -> dict[str, float]:
        """Those of the epoch that ends, which begins anew."""
        found = {name: total / count for name, (total, count) in self.sums.items() if count > 0}
        self.sums = {}
        return found

    def stops(self, *, epoch: bool) -> bool:
        """Whether training is over, now that metrics were measured: at the end of an `epoch`, or of a
        validation."""
        found = [self._stops(n) for n, each in enumerate(self.stopping) if each.each_epoch == epoch]
        return any(found)

    def _stops(self, number: int) -> bool:
        said, wait = self.stopping[number], self.waits[number]
        value = self.metrics.get(said.monitor)
        if value is None:
            if not said.strict:
                return False
            raise ConfigError(
                field=f"EarlyStopping(monitor={said.monitor!r})",
                problem="nobody logs it.",
                remedy=f"There is {', '.join(map(repr, sorted(self.metrics)))}.",
            )
        if said.check_finite and not math.isfinite(value):
            return True
        if said.stopping_threshold is not None and said.better(value, said.stopping_threshold):
            return True
        if said.divergence_threshold is not None and said.better(-value, -said.divergence_threshold):
            return True
        delta = -said.min_delta if said.mode == "min" else said.min_delta
        if said.better(value - delta, wait[0]):
            wait[:] = [value, 0.0]
            return False
        wait[1] += 1
        return wait[1] >= said.patience

    def state_dict(self) -> dict[str, Any]:
        return {
            "sums": {name: list(pair) for name, pair in self.sums.items()},
            "metrics": dict(self.metrics),
            "waits": [[_said(best), count] for best, count in self.waits],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.sums = {name: list(pair) for name, pair in state["sums"].items()}
        self.metrics = dict(state["metrics"])
        self.waits = [[float(best), count] for best, count in state["waits"]]


def _said(value: float) -> float | str:
    """Infinite numbers are no JSON."""
    return value if math.isfinite(value) else str(value)


def reported(values: Mapping[str, Value], *, epoch: bool) -> dict[str, float]:
    """What a hook logged, under the names that Lightning gives it: of a step, or of an epoch."""
    found: dict[str, float] = {}
    for name, each in values.items():
        if each.on_epoch if epoch else each.on_step:
            both = each.on_step and each.on_epoch
            found[f"{name}_{'epoch' if epoch else 'step'}" if both else name] = each.value
    return found
