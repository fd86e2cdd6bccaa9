"""Samples that are no function of their number are refused before the first step, whatever they draw from."""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from elastic_train.config import Batch, RunSpec
from elastic_train.errors import ConfigError
from elastic_train.testing.gang import Gang
from elastic_train.testing.gloo_pool import GlooPool
from elastic_train.testing.single_process_run import train_alone
from tests.tasks.tiny import TinyData, TinyTask

pytestmark = pytest.mark.ring2

SPEC = RunSpec(
    name="data",
    storage_path="/nowhere",
    batch=Batch(global_size=6, micro_size=2, seed=11),
    max_steps=2,
    min_workers=1,
    max_workers=4,
)


class Noisy(TinyData):
    """TinyData with a number in each sample that `draw` gives."""

    def __init__(self, draw: Callable[[int], Any], made: Any = 0.0) -> None:
        super().__init__(12)
        self.draw, self.made = draw, made

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**super().__getitem__(index), "noise": float(self.draw(index)), "made": self.made}


class Task(TinyTask):
    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self.make = make

    def dataset(self) -> Any:
        return self.make()


def own_seeded() -> Noisy:
    generator = np.random.default_rng(0)
    return Noisy(lambda _: generator.standard_normal())


def own_unseeded() -> Noisy:
    generator = np.random.default_rng()
    return Noisy(lambda _: generator.standard_normal())


def own_torch() -> Noisy:
    generator = torch.Generator().manual_seed(3)
    return Noisy(lambda _: torch.rand((), generator=generator))


def own_python() -> Noisy:
    generator = random.Random(3)
    return Noisy(lambda _: generator.random())


def clock() -> Noisy:
    return Noisy(lambda _: time.perf_counter())


def reads_before() -> Noisy:
    count = itertools.count()
    return Noisy(lambda _: next(count))


def made_unseeded() -> Noisy:
    return Noisy(float, made=np.random.default_rng().standard_normal())


@pytest.mark.parametrize(
    "make", [own_seeded, own_unseeded, own_torch, own_python, clock, reads_before, made_unseeded]
)
def test_samples_that_differ_the_second_time_are_refused_by_name(make: Callable[[], Any]) -> None:
    with pytest.raises(ConfigError, match=r"task.dataset: .*default_rng\(\(seed, i\)\)"):
        train_alone(Task(make), SPEC)


def from_globals() -> Noisy:
    return Noisy(lambda _: random.random() + np.random.rand() + float(torch.rand(())))


def from_the_number() -> Noisy:
    return Noisy(lambda i: np.random.default_rng((5, i)).standard_normal())


def made_from_globals() -> Any:
    return torch.utils.data.random_split(TinyData(20), [12, 8])[0]


@pytest.mark.parametrize("make", [from_globals, from_the_number, made_from_globals])
def test_samples_by_their_number_train_and_are_the_same_in_every_process(
    pool: GlooPool, make: Callable[[], Any]
) -> None:
    alone = [report.loss for report in train_alone(Task(make), SPEC)]
    gang = Gang(pool, Task(make), SPEC)
    gang.form(gang.plan(2, 1))
    np.testing.assert_allclose([report.loss for report in gang.run()], alone, rtol=1e-6)


class PerProcess:
    """Made quickly enough to be made twice only where the process is the same."""

    def __call__(self) -> Noisy:
        return Noisy(float, made=float(os.getpid()))


def test_other_samples_on_another_rank_are_refused(pool: GlooPool) -> None:
    gang = Gang(pool, Task(PerProcess()), SPEC)
    gang.form(gang.plan(2, 1))
    with pytest.raises(AssertionError, match="other samples on other ranks"):
        gang.run()
