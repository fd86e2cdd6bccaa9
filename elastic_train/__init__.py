"""Elastic training on Ray: lose nodes, gain nodes, keep the same losses.

    import elastic_train as et

Importing this package loads neither Ray nor torch; the names below load what they need when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_train.lazy_names import lazily

if TYPE_CHECKING:
    from elastic_train.api import ElasticTrainer, open_checkpoint
    from elastic_train.cli.job_file import main
    from elastic_train.config import (
        Batch,
        BoundaryLogs,
        Checkpoints,
        Limits,
        LossScale,
        Machines,
        Notices,
        Parallelism,
        ResumeFrom,
        Timing,
    )
    from elastic_train.integrations import lightning as lightning
    from elastic_train.integrations import torchtitan as torchtitan
    from elastic_train.integrations import tune as tune
    from elastic_train.train.custom.context import Context
    from elastic_train.train.model.positions import own_positions, position_numbers
    from elastic_train.train.task import Average, Evaluation, Rules, Task

__all__ = [
    "Average",
    "Batch",
    "BoundaryLogs",
    "Checkpoints",
    "Context",
    "ElasticTrainer",
    "Evaluation",
    "Limits",
    "LossScale",
    "Machines",
    "Notices",
    "Parallelism",
    "ResumeFrom",
    "Rules",
    "Task",
    "Timing",
    "main",
    "open_checkpoint",
    "own_positions",
    "position_numbers",
]

_HOMES = {
    "ElasticTrainer": "api",
    "main": "cli.job_file",
    "open_checkpoint": "api",
    "Batch": "config",
    "BoundaryLogs": "config",
    "Checkpoints": "config",
    "Limits": "config",
    "LossScale": "config",
    "Machines": "config",
    "Notices": "config",
    "Parallelism": "config",
    "ResumeFrom": "config",
    "Timing": "config",
    "Context": "train.custom.context",
    "own_positions": "train.model.positions",
    "position_numbers": "train.model.positions",
    "Average": "train.task",
    "Evaluation": "train.task",
    "Rules": "train.task",
    "Task": "train.task",
}

_ROOMS = {name: f"integrations.{name}" for name in ("lightning", "torchtitan", "tune")}
"""What is written for users of other libraries, each under its name."""

__getattr__, __dir__ = lazily(__name__, _HOMES, _ROOMS)
