"""Build the job's data set once per process, and check it against what the run recorded."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from elastic_train.config import Batch, RunSpec
from elastic_train.data.identity import DataIdentity, check_repeatable, identify, spread, unlike
from elastic_train.data.loader import Loader
from elastic_train.data.numbered import NumberedSamples, numbered, read_in_order
from elastic_train.data.order import MicroBatch, SampleOrder
from elastic_train.errors import ConfigError
from elastic_train.train.declaration.loop_task import LoopTask
from elastic_train.train.model import seeded_sections
from elastic_train.train.model.collate import Collate, stacked
from elastic_train.train.model.surroundings import Surroundings
from elastic_train.train.state import scalar_state as documents
from elastic_train.train.state.shards import Shards
from elastic_train.train.task import Task
from elastic_train.train.user_code_guard import UserCodeGuard

REBUILT_S = 2.0
"""A data set that is built within this time is built once more at the start of a run, to compare."""

Dumps = Callable[[Any], bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    dataset: NumberedSamples
    order: SampleOrder
    loader: Loader
    identity: DataIdentity
    build_s: float


@dataclass(frozen=True, slots=True)
class Collated:
    """Makes a micro-batch of samples; what a task's own code draws meanwhile depends on the step alone."""

    collate: Collate
    seed: int

    def __call__(self, samples: list[Any], micro_batch: MicroBatch) -> Any:
        if self.collate is stacked:
            return stacked(samples)
        with seeded_sections.collating(self.seed, micro_batch.step, micro_batch.index):
            return self.collate(samples)


def collated(task: Task, seed: int) -> Collated:
    """As the task says. A process of a loader gets no more of a loop than its function."""
    if isinstance(task, LoopTask):
        return Collated(task.collates, seed)
    return Collated(stacked if type(task).collate is Task.collate else task.collate, seed)


def loader_of(task: Task, dataset: NumberedSamples, spec: RunSpec, dumps: Dumps, *, seed: int) -> Loader:
    """Reads a data set as the run says, for training or for an evaluation."""
    return Loader(
        dataset,
        seed=seed,
        seeding=seeded_sections.sample,
        combine=collated(task, seed),
        workers=spec.batch.workers,
        ahead=spec.batch.prefetch,
        dumps=dumps,
    )


def build(task: Task, spec: RunSpec, guard: UserCodeGuard, dumps: Dumps) -> Data:
    seed = spec.batch.seed
    with guard.at("building the data set", 0):
        began = time.monotonic()
        dataset = _built(task, seed)
        build_s = time.monotonic() - began
        if spec.batch.shuffle and read_in_order(dataset):
            raise ConfigError(
                field="batch.shuffle",
                problem=f"{type(dataset).__name__} is read in the order of its numbers, and a shuffled order "
                "would read most of it for each sample.",
                remedy="Set Batch(shuffle=False); a Stream of shards shuffles itself with shuffle=True.",
            )
        identity = identify(dataset, seed=seed, seeding=seeded_sections.sample)
        loader = loader_of(task, dataset, spec, dumps, seed=seed)
    order = SampleOrder(identity.length, spec.batch)
    return Data(dataset=dataset, order=order, loader=loader, identity=identity, build_s=build_s)


def steps_per_epoch(task: Task, batch: Batch) -> int:
    """Of the task's data set, which is built to ask for its length."""
    task = copy.copy(task)  # what building leaves behind in a task is not the job
    if isinstance(task, LoopTask):
        with torch.device("meta"):
            task.model()  # a loop says what its data is once its models are declared
    return SampleOrder(len(_built(task, batch.seed)), batch).steps_per_epoch


def check_at_start(data: Data, task: Task, spec: RunSpec, shards: Shards, guard: UserCodeGuard) -> None:
    """Before the first step: ConfigError where samples are no function of their number.

    They are read twice, built twice where that is quick, and compared between the ranks: a generator of the
    data set's own gives other samples the second time. All ranks call it together.
    """
    seed = spec.batch.seed
    with guard.at("checking the data set", 0):
        _check_surroundings(data.dataset, seed)
        check_repeatable(data.dataset, seed=seed, seeding=seeded_sections.sample)
        if data.build_s < REBUILT_S:
            again = identify(_built(task, seed), seed=seed, seeding=seeded_sections.sample)
            if again != data.identity:
                raise unlike("building the data set twice gives other samples")
        _check_fit(data, task, spec)
    if shards.plan.world_size > 1:
        # 48 bits of it, which a float64 holds.
        number = float(int(data.identity.fingerprint[:12], 16))
        extremes = torch.tensor([number, -number], dtype=torch.float64, device=shards.device)
        with guard.collective("comparing the data", 0):
            dist.all_reduce(extremes, dist.ReduceOp.MAX)
            most, least = extremes.tolist()
        if most != -least:
            raise unlike("the data set has other samples on other ranks")


def _check_surroundings(dataset: NumberedSamples, seed: int) -> None:
    """ConfigError where reading a sample again changes what the data set's code keeps outside of it."""
    around = Surroundings.of([type(dataset)])
    marks: list[dict[str, Hashable]] = []
    for _ in range(2):  # the first may fill a cache
        with seeded_sections.sample(seed, 0, 0):
            dataset[0]
        marks.append(around.prints())
    for place, mark in marks[1].items():
        if marks[0].get(place) != mark:
            raise unlike(f"reading a sample changes {place}")


def _check_fit(data: Data, task: Task, spec: RunSpec) -> None:
    """Make micro-batches of samples from all over the data set, for the errors in it. Where it isn't shuffled
    each is one of the run's: samples that are never together may have other shapes.
    """
    combine, numbers, size = collated(task, spec.batch.seed), spread(data.dataset), spec.batch.micro_size
    for index, start in enumerate(range(0, len(numbers), size)):
        ids = tuple(numbers[start : start + size])
        if not spec.batch.shuffle:
            ids = data.order.with_sample(ids[0]).ids
        micro_batch = MicroBatch(step=0, index=index, epoch=0, ids=ids)
        samples: list[Any] = []
        for number in ids:
            with seeded_sections.sample(spec.batch.seed, 0, number):
                samples.append(data.dataset[number])
        combine(samples, micro_batch)


def _built(task: Task, seed: int) -> NumberedSamples:
    """What it draws from Python's, numpy's and torch's own generators is the same in every process."""
    with seeded_sections.building(seed):
        return numbered(task.dataset())


def described(shards: Shards, spec: RunSpec, identity: DataIdentity) -> dict[str, Any]:
    """The scalars of a state, and of the problem that it is a state of, as JSON values."""
    batch = ("global_size", "micro_size", "seed", "drop_last", "shuffle")
    return documents.describe(shards) | {
        "data": {"length": identity.length, "fingerprint": identity.fingerprint},
        "batch": {name: getattr(spec.batch, name) for name in batch},
        "precision": spec.precision,
    }
