"""A number on which the ranks that have micro-batches of a step agree."""

from __future__ import annotations

from collections.abc import Callable

import torch

from elastic_train.errors import ConfigError


def agreed_number(own: int | None, over_ranks: Callable[[torch.Tensor], torch.Tensor]) -> int:
    """What all ranks but those without an opinion, None, say; 0 where all are without. All of them call it.

    ConfigError where they differ. `over_ranks` sums a tensor over them.
    """
    said = 0 if own is None else own
    table = torch.tensor([float(own is not None), said, said * said], dtype=torch.float64)
    count, total, squares = over_ranks(table).tolist()
    if count * squares != total * total:  # Cauchy-Schwarz: equal where all numbers are
        raise ConfigError(
            field="step.agree",
            problem=f"ranks differ, one says {own}: what a step does would depend on which rank computes "
            "which samples.",
            remedy="Decide by the number of the step or the epoch, and not by the samples.",
        )
    return round(total / count) if count else 0
