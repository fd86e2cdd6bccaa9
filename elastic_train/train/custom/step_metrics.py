"""What a loop measures in a step, as means over the global batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Sums = tuple[float, float]
"""A sum and what it is a sum over."""


@dataclass(frozen=True, slots=True, kw_only=False)
class StepMetrics:
    """`over_ranks` sums a tensor over them, `names_of_all` gives what each of them names."""

    device: torch.device
    over_ranks: Callable[[torch.Tensor, str], torch.Tensor]
    names_of_all: Callable[[list[str]], list[list[str]]]

    def means(self, sums: Mapping[str, Sums]) -> dict[str, float]:
        """All ranks have the same names, in the same order. NaN where nothing was counted."""
        if not sums:
            return {}
        table = torch.tensor(list(sums.values()), dtype=torch.float64, device=self.device)
        found = zip(sums, self.over_ranks(table, "summing metrics").tolist(), strict=True)
        return {name: total / count if count > 0 else math.nan for name, (total, count) in found}

    def means_of_any(self, sums: Mapping[str, Sums], known: list[str]) -> dict[str, float]:
        """Of whatever names the ranks have, without those that were not measured in this step. `known` are
        the names that all ranks know; new ones are told to all, and it grows."""
        unknown = sorted(sums.keys() - set(known))
        asked = torch.tensor([float(len(unknown))], dtype=torch.float64, device=self.device)
        if self.over_ranks(asked, "agreeing on metrics")[0] > 0:
            known += sorted({name for own in self.names_of_all(unknown) for name in own})
        found = self.means({name: sums.get(name, (0.0, 0.0)) for name in known})
        return {name: value for name, value in found.items() if not math.isnan(value)}
