"""`trainer`: a config of torchtitan's as a run of this library."""

from __future__ import annotations

from typing import Any

from elastic_train.api import ElasticTrainer
from elastic_train.config import Batch, Checkpoints
from elastic_train.integrations.torchtitan.config_fields import PRECISIONS, check, parallelism_of
from elastic_train.integrations.torchtitan.titan_task import TitanTask
from elastic_train.train.task import Evaluation


def trainer(
    config: Any, dataset: Any, *, evaluation: Evaluation | None = None, **options: Any
) -> ElasticTrainer:
    """A trainer of what a `Trainer.Config` of torchtitan describes, or a function that makes one.

    `dataset` takes the place of the config's data loader, whose samples have no numbers: windows of
    `training.seq_len + 1` tokens, int64, or pairs of tokens and labels, as `d[i]`. Steps, sizes of a batch,
    clipping, precision, seed and how often to save are the config's, unless `options`, which are those of
    ElasticTrainer, say otherwise. ConfigError names the field of the config that is not supported.
    """
    config = config() if callable(config) else config
    check(config)
    training = config.training
    said: dict[str, Any] = {
        "batch": Batch(
            global_size=training.global_batch_size,
            micro_size=training.local_batch_size,
            seed=config.debug.seed or 0,
        ),
        "max_steps": training.steps,
        "clip_norm": float(training.max_norm),
        "precision": PRECISIONS[training.mixed_precision_param],
        "parallelism": parallelism_of(config),
    }
    if config.checkpoint.enable:
        said["checkpoints"] = Checkpoints(
            every=config.checkpoint.interval, keep=config.checkpoint.keep_latest_k
        )
    return ElasticTrainer(TitanTask(config, dataset, evaluation), **{**said, **options})
