"""Which fields of a torchtitan config have a meaning here: what is not supported is refused by its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastic_train.config import Parallelism, Precision
from elastic_train.errors import ConfigError
from elastic_train.integrations.torchtitan.field_table import check_fields
from elastic_train.integrations.torchtitan.refusals import REFUSED

PRECISIONS: Mapping[str, Precision] = {"float32": "fp32", "bfloat16": "bf16"}


def check(config: Any) -> None:
    """ConfigError that names the field."""
    if getattr(config, "model_spec", None) is None:
        raise ConfigError(
            field="torchtitan.trainer(config)",
            problem=f"{type(config).__name__} has no model_spec.",
            remedy="Give a Trainer.Config of torchtitan, or a function of a config_registry that makes one.",
        )
    kind = type(config)
    if (kind.__module__, kind.__qualname__) != ("torchtitan.trainer", "Trainer.Config"):
        raise ConfigError(
            field="torchtitan.trainer(config)",
            problem=f"it is a {kind.__qualname__} of {kind.__module__}, whose trainer nobody would call.",
            remedy="Give a Trainer.Config of torchtitan.trainer, or write a Task.",
        )
    if not hasattr(config.model_spec.model, "layers"):
        raise ConfigError(field="config.model_spec", problem=f"{config.model_spec.name} is no decoder.")
    for field, says, problem, remedy in REFUSED:
        if says(config):
            raise ConfigError(field=f"config.{field}", problem=problem, remedy=remedy)
    check_fields(config)


def parallelism_of(config: Any) -> Parallelism:
    """What it says of tensor parallelism and shards; whatever it leaves open is planned."""
    said = config.parallelism
    shards = said.data_parallel_shard_degree
    return Parallelism(
        tp=said.tensor_parallel_degree if said.tensor_parallel_degree > 1 else None,
        dp_shard=shards if shards > 1 else None,
    )
