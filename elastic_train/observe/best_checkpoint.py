"""Find the best checkpoint by a metric, from the journal."""

from __future__ import annotations

import math
from collections.abc import Iterable

from elastic_train.config import Checkpoints
from elastic_train.control.events import CheckpointCommitted
from elastic_train.observe.journal_records import Record


def best(records: Iterable[Record], checkpoints: Checkpoints) -> str:
    """Which checkpoint is the best one, or that none has the metric; empty where nobody asks for one."""
    metric = checkpoints.best
    if metric is None:
        return ""
    sign = 1.0 if checkpoints.best_order == "max" else -1.0
    committed = [r.event for r in records if isinstance(r.event, CheckpointCommitted)]
    if not committed:
        return ""
    scored = [(sign * dict(e.metrics).get(metric, math.nan), e.stored.step) for e in committed]
    finite = [entry for entry in scored if math.isfinite(entry[0])]
    if not finite:
        return f"no checkpoint has the metric {metric!r}: none of them is kept as the best"
    value, step = max(finite)
    return f"best {metric} {sign * value:.4g} at step {step}"
