"""What a rule gets and gives: tensors of one parameter group that are undone in one go."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from elastic_train.train.undo import foreach
from elastic_train.train.undo.foreach import Tensors

Undone = dict[str, Tensors]
"""What each tensor was before the step, by state name; `param` are the parameters."""

MAX_AMPLIFICATION = 10.0
"""A rule multiplies the rounding of what it inverts at most by this."""

LOST = 16.0
"""A difference below so many roundings of its operands has lost its digits."""


class Refusal(Exception):
    """A rule's reason not to undo, and the place in the bucket of the tensor that is to blame."""

    def __init__(self, reason: str, place: int = 0) -> None:
        super().__init__(reason)
        self.reason, self.place = reason, place


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Local tensors after a step, one per parameter in every list, and the gradients that were applied.

    `updates` is how many steps led here, 0 where the optimizer doesn't count. `settings` are the group's
    hyperparameters during the step, tensors among them as numbers.
    """

    parameters: Tensors
    gradients: Tensors
    states: Mapping[str, Tensors]
    updates: int
    settings: Mapping[str, Any]

    def ascent(self) -> Tensors:
        """The gradients in the direction in which the optimizer descends."""
        if self.settings.get("maximize"):
            return foreach.negative(self.gradients)
        return self.gradients

    def number(self, name: str) -> float:
        return float(self.settings[name])


Rule = Callable[[Bucket], Undone]


def grown(values: Tensors, by: float) -> Tensors:
    """Values before a decoupled decay that multiplied them by 1 - `by`."""
    if by == 0.0:
        return values
    if not 1.0 - by >= 1.0 / MAX_AMPLIFICATION:
        raise Refusal(f"the decay of one step, {by:.3g}, leaves too little of the parameter to undo it")
    return foreach.divide(values, 1.0 - by)


def without_average(after: Tensors, fresh: Tensors, beta: float) -> Tensors:
    """m in `after` = beta m + (1 - beta) fresh."""
    if beta == 0.0:  # the next step forgets it too
        return [torch.zeros_like(value) for value in after]
    if beta < 1.0 / MAX_AMPLIFICATION:
        raise Refusal(f"an average that keeps only {beta:.3g} of itself cannot be undone")
    older = foreach.add(after, fresh, alpha=beta - 1.0)
    return foreach.divide(older, beta)


def without_square(after: Tensors, fresh: Tensors, beta: float) -> Tensors:
    """v in `after` = beta v + (1 - beta) fresh^2; elements may come out negative or without digits."""
    if beta < 1.0 / MAX_AMPLIFICATION:
        raise Refusal(f"an average of squares that keeps only {beta:.3g} of itself cannot be undone")
    older = foreach.add_product(after, fresh, fresh, value=beta - 1.0)
    return foreach.divide(older, beta)


def lost_digits(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Where `before`, a difference of numbers as large as `after`, is mere rounding. Zeros stay zeros."""
    limit = LOST * torch.finfo(after.dtype).eps
    return (before < after * limit) & (after > 0)


def refuse_lost(before: Tensors, after: Tensors, what: str) -> None:
    """Refuse where an average of squares lost its digits or came out negative."""
    for place, (old, new) in enumerate(zip(before, after, strict=True)):
        count = int(lost_digits(old, new).sum())
        if count:
            raise Refusal(
                f"the last gradient outweighs all before it in {count} elements of {what}, "
                "whose earlier values are lost in rounding",
                place,
            )
