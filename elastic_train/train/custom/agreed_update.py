"""Outcome of an update inside a step, which all ranks agreed on."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_train.config import RunSpec
from elastic_train.train.step.update import gradient_norm
from elastic_train.train.step.vote import StepStatistics


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """What an update inside a step came to."""

    loss: float
    grad_norm: float
    skipped: bool

    @classmethod
    def of(cls, agreed: StepStatistics, spec: RunSpec) -> Agreed:
        norm = gradient_norm(agreed, spec)
        return cls(loss=agreed.mean_loss, grad_norm=norm, skipped=agreed.skipped)
