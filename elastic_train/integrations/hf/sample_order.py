"""The order of samples: what transformers' samplers give in one process, as a function of seed and epoch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch.utils.data import RandomSampler
from transformers.trainer_pt_utils import get_length_grouped_indices

Strategy = Literal["random", "sequential", "group_by_length"]


class InOrder:
    """A data set whose sample k is the k-th one that an epoch trains.

    Random orders are drawn as by accelerate's sampler, from a generator with the seed plus the epoch. Those
    by length are drawn by transformers from torch's global generator, which its Trainer seeded: here as if
    each epoch's loader and order were all that draws from it.
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
    ) -> None:
        """`length` samples of an epoch are trained, the rest dropped; `lengths` of all in tokens, and the
        samples of a `batch`, are for orders by length."""
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
        for _ in range(epoch + 1):
            torch.empty((), dtype=torch.int64).random_(generator=generator)  # the seed of a loader's workers
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
