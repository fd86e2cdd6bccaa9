"""Checkpoint retention: keep the newest of this lineage, the best by metric, and the one in use."""

from __future__ import annotations

import math
from collections.abc import Sequence

from elastic_train.config import Checkpoints
from elastic_train.recovery.evidence import Commitment


def kept_slots(
    commitments: Sequence[Commitment], checkpoints: Checkpoints, *, in_use: int | None = None
) -> tuple[int, ...]:
    """Slots of the commit log that stay, ascending. Order is by step, never by name or time."""
    newest = sorted(commitments, key=lambda c: (c.stored.step, c.stored.slot))[-checkpoints.keep :]
    kept = {c.stored.slot for c in newest}
    if checkpoints.best is not None:
        kept |= {c.stored.slot for c in _best(commitments, checkpoints.best, checkpoints)}
    if in_use is not None:
        kept.add(in_use)
    return tuple(sorted(kept))


def _best(commitments: Sequence[Commitment], metric: str, checkpoints: Checkpoints) -> list[Commitment]:
    """The best by a metric; of equals the newer. Those without a finite value don't take part."""
    sign = 1.0 if checkpoints.best_order == "max" else -1.0
    scored: list[tuple[float, int, Commitment]] = []
    for commitment in commitments:
        value = dict(commitment.metrics).get(metric, math.nan)
        if math.isfinite(value):
            scored.append((sign * value, commitment.stored.step, commitment))
    scored.sort(key=lambda entry: entry[:2])
    return [entry[2] for entry in scored[-checkpoints.keep_best :]]
