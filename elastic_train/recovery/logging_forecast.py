"""Forecast before a run: size of the boundary logs, and how soon a lost stage is back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from elastic_train.planner.model_shape import ModelShape
from elastic_train.planner.plan import bytes_text
from elastic_train.recovery.boundary_groups import Boundaries, Logging


def boundaries(
    stages: Sequence[tuple[int, int]], shape: ModelShape, micro_batches: int, interval: int, bytes_s: float
) -> Boundaries:
    """Of a pipeline; `stages` are ranges of blocks. Times are the planner's.

    What crosses a boundary in a step is an activation and its gradient for each micro-batch.
    """
    blocks = [n for n, layer in enumerate(shape.layers) if layer.block]
    places = [*blocks, blocks[-1] + 1]  # the last stage may be what comes after the blocks alone
    starts = [0, *(places[first] for first, _ in stages[1:]), len(shape.layers)]
    seconds = [
        micro_batches * sum(layer.seconds for layer in shape.layers[start:stop])
        for start, stop in pairwise(starts)
    ]
    edge = 2 * micro_batches * shape.boundary_bytes
    return Boundaries(
        machine_s=tuple(seconds), edge_bytes=(edge,) * (len(stages) - 1), interval=interval, bytes_s=bytes_s
    )


def sentences(choices: Sequence[Logging], interval: int, budget: int | None = None) -> tuple[str, ...]:
    """One line for each choice of what to log, the whole log first; the first within the budget is taken."""
    taken = next((made for made in choices if budget is None or made.log_bytes <= budget), None)
    return tuple(
        f"log of {_which(made)}: up to {bytes_text(made.log_bytes)} in {interval} steps between checkpoints, "
        f"a lost stage is back after {made.recovery_s:.3g} s of replay in the mean"
        f"{' (chosen)' if made is taken else ''}"
        for made in choices
    )


def _which(made: Logging) -> str:
    logged = [str(stop) for _, stop in made.groups[:-1]]
    if not logged:
        return "nothing"
    return f"the boundar{'y' if len(logged) == 1 else 'ies'} before stage {', '.join(logged)}"
