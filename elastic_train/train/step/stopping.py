"""A run that ends where its evaluations get no better."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from elastic_train.train.task import Evaluation


def looked_at(
    evaluation: Evaluation, before: Mapping[str, Any], metrics: Mapping[str, float]
) -> dict[str, Any]:
    """What is known after an evaluation: the best value, and how many evaluations were no better since."""
    value = metrics[evaluation.watched(metrics)]
    sign = 1.0 if evaluation.order == "max" else -1.0
    best = before.get("best")
    better = math.isfinite(value) and (best is None or sign * value > sign * best)
    return {"best": value if better else best, "waited": 0 if better else before.get("waited", 0) + 1}


def is_over(evaluation: Evaluation | None, known: Mapping[str, Any]) -> bool:
    """Whether patience is at its end."""
    patience = None if evaluation is None else evaluation.patience
    return patience is not None and known.get("waited", 0) >= patience
