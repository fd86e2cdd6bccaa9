"""Samples drawn by weights, which may change from epoch to epoch: a curriculum, or the balance of classes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from elastic_train.data.hash_mix import mix64
from elastic_train.data.numbered import NumberedSamples, numbered, read_in_order, tell_epoch
from elastic_train.errors import ConfigError

Weights = Sequence[float] | npt.NDArray[Any]


class Weighted:
    """`samples` draws with replacement, each sample of `dataset` as often as its weight says.

    `weights` are one for each sample, or a function from the epoch to them; zero leaves a sample out. Draw i
    of an epoch is a function of (seed, epoch, i), as torch's WeightedRandomSampler is none.
    """

    def __init__(
        self,
        dataset: NumberedSamples,
        weights: Weights | Callable[[int], Weights],
        *,
        samples: int | None = None,
        seed: int = 0,
    ):
        if samples is not None and samples < 1:
            raise ConfigError(field="weighted.samples", problem=f"must be positive, got {samples}.")
        if read_in_order(dataset):
            raise ConfigError(
                field="weighted.dataset",
                problem=f"{type(dataset).__name__} is read in the order of its numbers, and draws have none.",
                remedy="Write it where a sample can be read alone, as a table or lines of JSON.",
            )
        self.dataset, self.weights, self.samples, self.seed = numbered(dataset), weights, samples, seed
        self._epoch, self._ends = 0, None

    def set_epoch(self, epoch: int) -> None:
        """From here on samples are those of this epoch."""
        if epoch != self._epoch and callable(self.weights):
            self._ends = None
        self._epoch = epoch
        tell_epoch(self.dataset, epoch)

    def __len__(self) -> int:
        return len(self.dataset) if self.samples is None else self.samples

    def __getitem__(self, index: int) -> Any:
        return self.dataset[self.drawn(index)]

    def drawn(self, index: int) -> int:
        """The number in the data set of a draw of this epoch."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        key = hashlib.blake2b(f"weighted {self.seed} {self._epoch}".encode(), digest_size=8).digest()
        start = np.frombuffer(key, dtype="<u8").astype(np.uint64)
        word = int(mix64(start + np.array([index], dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))[0])
        ends = self._summed()
        return int(np.searchsorted(ends, (word >> 11) * 2.0**-53 * ends[-1], side="right"))

    def describe(self) -> Any:
        describe = getattr(self.dataset, "describe", None)
        return (describe() if callable(describe) else None, self.seed, self._summed())

    def _summed(self) -> npt.NDArray[np.float64]:
        if self._ends is None:
            given = self.weights(self._epoch) if callable(self.weights) else self.weights
            weights = np.asarray(given, dtype=np.float64)
            usable = (
                weights.shape == (len(self.dataset),) and np.isfinite(weights).all() and (weights >= 0).all()
            )
            if not usable or not weights.sum() > 0:
                raise ConfigError(
                    field="weighted.weights",
                    problem=f"in epoch {self._epoch} they are no {len(self.dataset)} numbers of 0 or "
                    "more, one for each sample and some above 0.",
                )
            self._ends = np.cumsum(weights)
        return self._ends
