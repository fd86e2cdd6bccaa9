"""The sample order: a step's micro-batches as a function of the data set's length and the batch alone.

Nothing here knows ranks, world sizes or progress, so a resumed or resized run asks for the next step and gets
what an undisturbed run would have got.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from elastic_train.config import Batch
from elastic_train.data.hash_mix import mix64
from elastic_train.data.permutation import Permutation
from elastic_train.errors import ConfigError

DIGEST_MODULUS = 1 << 40
"""Digests are below 2^40, so that 2^13 of them add up exactly in a float64 (53 bits) all-reduce."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One slice of a step's batch: `micro_size` sample ids, or fewer, in a batch's last one."""

    step: int
    index: int
    epoch: int
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """Which samples each step trains, each exactly once per epoch.

    No step holds samples of two epochs: an epoch's last step is smaller, or left out with `batch.drop_last`.
    """

    length: int
    batch: Batch

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ConfigError(
                field="dataset", problem="it holds no samples.", remedy="Check its paths and filters."
            )
        if self.batch.drop_last and self.length < self.batch.global_size:
            raise ConfigError(
                field="batch.drop_last",
                problem=(
                    f"the data set's {self.length} samples are fewer than batch.global_size "
                    f"{self.batch.global_size}, so every batch would be dropped."
                ),
                remedy="Lower global_size or set drop_last=False.",
            )

    @property
    def steps_per_epoch(self) -> int:
        whole, rest = divmod(self.length, self.batch.global_size)
        return whole if self.batch.drop_last or not rest else whole + 1

    def epoch(self, step: int) -> int:
        """Epoch of a step; both the first step, 1, and its epoch, 0, start the count."""
        assert step >= 1, "steps count from 1"
        return (step - 1) // self.steps_per_epoch

    def sample_ids(self, step: int) -> npt.NDArray[np.int64]:
        """The sample ids of a step, in order."""
        epoch = self.epoch(step)
        start = (step - 1) % self.steps_per_epoch * self.batch.global_size
        positions = np.arange(start, min(start + self.batch.global_size, self.length), dtype=np.int64)
        return (
            Permutation(self.length, self.batch.seed, epoch)(positions) if self.batch.shuffle else positions
        )

    def count(self, step: int) -> int:
        """How many micro-batches a step has."""
        first = (step - 1) % self.steps_per_epoch * self.batch.global_size
        samples = min(self.batch.global_size, self.length - first)
        return -(-samples // self.batch.micro_size)

    def micro_batches(self, step: int) -> tuple[MicroBatch, ...]:
        """The step's micro-batches by index: as many as its samples fill, the last one with what is left."""
        ids, size, epoch = self.sample_ids(step), self.batch.micro_size, self.epoch(step)
        slices = (ids[start : start + size] for start in range(0, len(ids), size))
        return tuple(
            MicroBatch(step=step, index=index, epoch=epoch, ids=tuple(part.tolist()))
            for index, part in enumerate(slices)
        )

    def with_sample(self, number: int) -> MicroBatch:
        """The micro-batch of the first epoch that has a sample, in an order that is not shuffled; with
        `drop_last` the one before where it has none.
        """
        step = min(number // self.batch.global_size + 1, self.steps_per_epoch)
        micro_batches = self.micro_batches(step)
        place = number - (step - 1) * self.batch.global_size
        return micro_batches[min(place // self.batch.micro_size, len(micro_batches) - 1)]

    def smallest(self, max_steps: int) -> MicroBatch | None:
        """The smallest micro-batch up to a step, of the first epoch; None where all are whole."""
        steps = {1, self.steps_per_epoch}
        found = sorted((self.micro_batches(s)[-1] for s in steps if s <= max_steps), key=lambda m: len(m.ids))
        return next((micro for micro in found if len(micro.ids) < self.batch.micro_size), None)


def ids_digest(ids: Iterable[int]) -> int:
    """Checksum of a multiset of sample ids, below 2^40; digests of parts add up to the digest of the whole.

    Each id is mixed to 64 bits and the sum taken modulo 2^40, so that neither order nor division matters and
    a missing or repeated id shows. Add parts with `fold_digests`.
    """
    mixed = mix64(np.fromiter(ids, dtype=np.int64).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15))
    return int(mixed.sum(dtype=np.uint64)) % DIGEST_MODULUS


def fold_digests(total: float) -> int:
    """The digest of all parts from the plain sum of theirs, which a float64 holds exactly below 2^53."""
    assert 0 <= total < 2**53, "more than 2^13 digests were added"
    return int(total) % DIGEST_MODULUS
