"""A job for tests: the small language model with short deadlines, and a loss that may raise."""

from __future__ import annotations

import dataclasses

import elastic_train as et
from jobs.pretrain_lm import Pretrain
from jobs.pretrain_lm import trainer as pretrain


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
    timing = et.Timing(lease_s=8.0, join_window_s=1.0, wait_for_capacity_s=20.0)
    made.spec = dataclasses.replace(made.spec, timing=timing, checkpoints=et.Checkpoints(every=10, keep=2))
    return made


if __name__ == "__main__":
    et.main(trainer)
