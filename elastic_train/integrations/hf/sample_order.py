"""The order of samples: what transformers' samplers give in one process, as a function of seed and epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils.data import RandomSampler
from transformers.trainer_pt_utils import get_length_grouped_indices

Strategy = Literal["random", "sequential", "group_by_length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluations:
    """How often loaders of evaluations draw from torch's global generator: once for each of `sets`, every so
    many steps (0: never) and, with `at_start`, before the first."""

    sets: int = 0
    every: int = 0
    steps_per_epoch: int = 1
    at_start: bool = False

    def before(self, epoch: int) -> int:
        """Draws until this epoch begins."""
        measured = epoch * self.steps_per_epoch // self.every if self.every else 0
        return (measured + self.at_start) * self.sets


class InOrder:
    """A data set whose sample k is the k-th one that an epoch trains.

    Random orders are drawn as by accelerate's sampler, from a generator with the seed plus the epoch. Those
    by length are drawn by transformers from torch's global generator, which its Trainer seeded: here as if
    loaders and orders were all that draws from it.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        strategy: Strategy,
        seed: int,
        length: int,
        lengths: Sequence[int] = (),
        batch: int = 1,
        evaluations: Evaluations | None = None,
    ) -> None:
        """`length` samples of an epoch are trained, the rest dropped; `lengths` of all in tokens, the samples
        of a `batch`, and `evaluations` are for orders by length."""
        self._evaluations = evaluations or Evaluations()
        self.dataset, self._strategy, self._seed = dataset, strategy, seed
        self._length, self._lengths, self._batch = length, list(lengths), batch
        self._epoch = 0
        self._known: tuple[int, Sequence[int]] | None = None

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, number: int) -> Any:
        if not 0 <= number < self._length:
            raise IndexError(f"sample {number} of {self._length}")
        return self.dataset[self.order(self._epoch)[number]]

    def set_epoch(self, epoch: int) -> None:
        """The epoch whose samples are read next."""
        self._epoch = epoch
        tell = getattr(self.dataset, "set_epoch", None)
        if callable(tell):
            tell(epoch)

    def order(self, epoch: int) -> Sequence[int]:
        """The numbers of all samples of the data set, as this epoch reads them."""
        if self._known is None or self._known[0] != epoch:
            self._known = epoch, self._drawn(epoch)
        return self._known[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known": None}

    def _drawn(self, epoch: int) -> Sequence[int]:
        whole = range(len(self.dataset))
        if self._strategy == "sequential":
            return whole
        generator = torch.Generator()
        if self._strategy == "random":
            generator.manual_seed(self._seed + epoch)
            return list(RandomSampler(whole, generator=generator))
        generator.manual_seed(self._seed)
        found: Sequence[int] = ()
        evaluated = 0
        for number in range(epoch + 1):
            before, evaluated = evaluated, self._evaluations.before(number)
            for _ in range(evaluated - before + 1):  # each loader draws a seed for its processes
                torch.empty((), dtype=torch.int64).random_(generator=generator)
            found = get_length_grouped_indices(self._lengths, self._batch, generator=generator)
        return found


class BatchesToEvaluate:
    """Data sets by name, cut into the batches that transformers evaluates; a sample is one of them."""

    def __init__(self, sets: dict[str, Any], *, size: int, orders: dict[str, Sequence[int]]) -> None:
        """`orders` are of those that aren't read from first to last."""
        self._sets, self._size, self._orders = sets, size, orders
        self._places = [
            (name, start) for name, dataset in sets.items() for start in range(0, len(dataset), size)
        ]

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, number: int) -> tuple[str, list[Any]]:
        name, start = self._places[number]
        dataset = self._sets[name]
        order = self._orders.get(name, range(len(dataset)))
        return name, [dataset[int(i)] for i in order[start : start + self._size]]
