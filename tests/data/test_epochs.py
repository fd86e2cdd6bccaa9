"""Data sets that know the epoch: a sample is a function of the seed, the epoch and its number."""

from __future__ import annotations

import pickle
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from elastic_train.config import Batch
from elastic_train.data.identity import check_repeatable, identify
from elastic_train.data.loader import Loader
from elastic_train.data.mixture import Mixture
from elastic_train.data.order import SampleOrder
from elastic_train.data.sample_range import SourcePart
from elastic_train.data.weighted import Weighted
from elastic_train.errors import ConfigError

pytestmark = pytest.mark.ring1


class Growing:
    """Sample i of epoch e, as augmentation that becomes stronger."""

    draws_nothing = True

    def __init__(self, length: int = 10) -> None:
        self.length, self.epoch = length, -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, int]:
        return self.epoch, index


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda d: d,
        lambda d: SourcePart(d, 0, 10),
        lambda d: torch.utils.data.Subset(d, range(10)),
        lambda d: torch.utils.data.ConcatDataset([d]),
        lambda d: SourcePart(Mixture({"one": d}), 0, 10),
    ],
)
def test_a_data_set_is_told_the_epoch_of_each_micro_batch(wrap: Any, workers: int):
    order = SampleOrder(10, Batch(global_size=5, micro_size=2, seed=1))
    micros = [micro for step in range(1, 9) for micro in order.micro_batches(step)]
    with Loader(wrap(Growing()), seed=0, workers=workers) as loader:
        for at in [*range(len(micros)), 3, 20, 0]:  # and back, as after a failure
            micro = micros[at]
            assert loader.load(micro, micros[at + 1 :]) == [(micro.epoch, i) for i in micro.ids]


def test_the_identity_is_that_of_the_first_epoch():
    later = Growing()
    later.set_epoch(7)
    assert identify(later) == identify(Growing())
    check_repeatable(Growing())


def test_draws_follow_the_weights_and_depend_on_seed_epoch_and_number():
    weights = np.array([0.0, 1.0, 2.0, 5.0])
    drawn = Weighted(list("abcd"), weights, samples=8000, seed=3)
    counts = Counter(drawn[i] for i in range(8000))
    assert set(counts) == set("bcd")
    # Standard deviations are below 45 draws; the seed is fixed.
    assert [counts[c] for c in "bcd"] == pytest.approx([1000, 2000, 5000], abs=135)
    again = pickle.loads(pickle.dumps(drawn))
    assert [again[i] for i in reversed(range(50))] == [drawn[i] for i in reversed(range(50))]
    first = [drawn.drawn(i) for i in range(200)]
    drawn.set_epoch(1)
    assert [drawn.drawn(i) for i in range(200)] != first
    drawn.set_epoch(0)
    assert [drawn.drawn(i) for i in range(200)] == first


def curriculum(epoch: int) -> list[float]:
    return [1.0] * (epoch + 1) + [0.0] * (9 - epoch)


def test_a_curriculum_gives_each_epoch_its_own_weights():
    drawn = Weighted(range(10), curriculum, samples=300)
    for epoch in (0, 4, 2):
        drawn.set_epoch(epoch)
        assert {drawn[i] for i in range(300)} == set(range(epoch + 1))


@pytest.mark.parametrize("weights", [[1.0], [0.0, 0.0], [1.0, -1.0], [1.0, float("nan")]])
def test_weights_that_are_none_are_refused(weights: list[float]):
    with pytest.raises(ConfigError, match=r"weighted\.weights: in epoch 0 they are no 2 numbers"):
        Weighted(["a", "b"], weights)[0]
