"""A job for tests: the small language model with short deadlines, and a loss that may raise."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import elastic_train as et
from elastic_train.testing.slow_samples import SlowSamples
from jobs.pretrain_lm import Pretrain
from jobs.pretrain_lm import trainer as pretrain

EVERY = 10
"""Steps from one checkpoint to the next."""


@dataclass(frozen=True, kw_only=True)
class Slow(Pretrain):
    """With samples that take a while, so that others have the time to come and go."""

    seconds: float

    def dataset(self):
        return SlowSamples(super().dataset(), self.seconds)


class Raises(Pretrain):
    def loss(self, output, micro_batch):
        raise ValueError("a bug of the job's own")


def trainer(
    *,
    max_steps: int = 100,
    workers: str = "1:2",
    storage: str = "./runs",
    name: str = "small",
    raises: bool = False,
    evaluate_every: int = 0,
    seconds_per_sample: float = 0.0,
    standby: int = 1,
    wait_for_capacity_s: float = 20.0,
) -> et.ElasticTrainer:
    """Pretrain a small language model."""
    made = pretrain(
        size="nano",
        dropout=0.1,
        max_steps=max_steps,
        workers=workers,
        storage=storage,
        name=name,
        evaluate_every=evaluate_every,
    )
    if raises:
        made.task = Raises(**vars(made.task))
    elif seconds_per_sample:
        made.task = Slow(**vars(made.task), seconds=seconds_per_sample)
    timing = et.Timing(lease_s=8.0, join_window_s=1.0, wait_for_capacity_s=wait_for_capacity_s)
    made.spec = dataclasses.replace(
        made.spec, timing=timing, standby=standby, checkpoints=et.Checkpoints(every=EVERY, keep=2)
    )
    return made


if __name__ == "__main__":
    et.main(trainer)
