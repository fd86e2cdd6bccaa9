"""The factor of the loss in float16, whose small gradients would vanish, as torch.amp.GradScaler keeps it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from elastic_train.config import LossScale, RunSpec
from elastic_train.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """`value`, and for how many steps it was good."""

    value: float
    steps: int = 0

    def after(self, finite: bool, how: LossScale) -> Scale:
        """After a step whose gradient was `finite` or not. In float32, as torch computes it."""
        if not finite:
            return Scale(value=_float32(self.value * how.backoff))
        if self.steps + 1 < how.interval:
            return Scale(value=self.value, steps=self.steps + 1)
        grown = _float32(self.value * how.growth)
        return Scale(value=grown if math.isfinite(grown) else self.value)


def first_scale(spec: RunSpec) -> Scale | None:
    """Of a run's first step; None where losses are not scaled."""
    return Scale(value=_float32(how_scaled(spec).init)) if spec.precision == "fp16" else None


def how_scaled(spec: RunSpec) -> LossScale:
    return spec.loss_scale or LossScale()


def check_no_scaler(name: str, thing: object) -> None:
    """ConfigError for a scaler of a loop's own: it would unscale and step on its own."""
    if isinstance(thing, torch.amp.GradScaler):
        raise ConfigError(
            field=f"loop: {name!r}",
            problem="torch.amp.GradScaler looks at the gradient of one rank, and steps without a vote.",
            remedy="Leave it out: ElasticTrainer(precision='fp16', loss_scale=LossScale(...)) scales losses, "
            "skips and grows as it does, by what all ranks agreed on.",
        )


def _float32(value: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.float32(value))
