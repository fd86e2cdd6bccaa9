"""Which fields of a torchtitan config have a meaning here: what is not supported is refused by its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from elastic_train.config import Parallelism, Precision
from elastic_train.errors import ConfigError

PRECISIONS: Mapping[str, Precision] = {"float32": "fp32", "bfloat16": "bf16"}

Refusal = tuple[str, Callable[[Any], bool], str, str]
REFUSED: tuple[Refusal, ...] = (
    (
        "training.global_batch_size",
        lambda c: c.training.global_batch_size < 1,
        "follows from the number of machines.",
        "Say how many samples a step has, on however many machines.",
    ),
    ("training.dtype", lambda c: c.training.dtype != "float32", "parameters are float32 here.", ""),
    (
        "training.enable_cpu_offload",
        lambda c: c.training.enable_cpu_offload,
        "has no counterpart here.",
        "Use more workers: plans divide the state.",
    ),
    (
        "parallelism.pipeline_parallel_degree",
        lambda c: c.parallelism.pipeline_parallel_degree > 1,
        "its blocks are in a ModuleDict, and pipelines are cut in a ModuleList.",
        "Use tensor parallelism.",
    ),
    (
        "parallelism.context_parallel_degree",
        lambda c: c.parallelism.context_parallel_degree > 1,
        "context parallelism is not part of a run.",
        "Use tensor parallelism, which divides positions too.",
    ),
    (
        "parallelism.expert_parallel_degree",
        lambda c: c.parallelism.expert_parallel_degree > 1,
        "experts of torchtitan are not divided here.",
        "",
    ),
    (
        "model_spec.model.layers",
        lambda c: any(layer.moe is not None for layer in c.model_spec.model.layers),
        "mixtures of experts are not supported: their balance is moved outside of the model.",
        "",
    ),
    (
        "model_spec.post_optimizer_build_fn",
        lambda c: c.model_spec.post_optimizer_build_fn is not None,
        "hooks of an optimizer would see one rank's part.",
        "Edit gradients in a Task of your own.",
    ),
    (
        "optimizer.param_groups",
        lambda c: {g.optimizer_name for g in c.optimizer.param_groups} not in ({"Adam"}, {"AdamW"}),
        "is not one of Adam or AdamW for all parameters.",
        "",
    ),
    (
        "optimizer.implementation",
        lambda c: c.optimizer.implementation not in ("fused", "foreach", "for-loop"),
        "its moments would not be float32.",
        'Use "fused".',
    ),
    (
        "loss",
        lambda c: _kind(getattr(c.loss, "loss_fn", c.loss)) != "CrossEntropyLoss.Config",
        "is no cross entropy.",
        "Write a Task, and build the model in it.",
    ),
    (
        "compile.enable",
        lambda c: c.compile.enable,
        "is not passed on.",
        "Write a Task whose model() compiles its blocks.",
    ),
    ("override.imports", lambda c: bool(c.override.imports), "overrides are not applied.", ""),
    (
        "validator.enable",
        lambda c: c.validator.enable,
        "its data loader is a stream.",
        "Give torchtitan.trainer(evaluation=et.Evaluation(dataset=...)).",
    ),
    (
        "checkpoint.initial_load_path",
        lambda c: bool(c.checkpoint.initial_load_path),
        "is not read.",
        "Give torchtitan.trainer(resume_from=...).",
    ),
)
"""Of a config: the field, whether it says what is not supported, why that is so, what to do instead."""


def check(config: Any) -> None:
    """ConfigError that names the field."""
    if getattr(config, "model_spec", None) is None:
        raise ConfigError(
            field="torchtitan.trainer(config)",
            problem=f"{type(config).__name__} has no model_spec.",
            remedy="Give a Trainer.Config of torchtitan, or a function of a config_registry that makes one.",
        )
    if not hasattr(config.model_spec.model, "layers"):
        raise ConfigError(field="config.model_spec", problem=f"{config.model_spec.name} is no decoder.")
    for field, says, problem, remedy in REFUSED:
        if says(config):
            raise ConfigError(field=f"config.{field}", problem=problem, remedy=remedy)


def parallelism_of(config: Any) -> Parallelism:
    """What it says of tensor parallelism and shards; whatever it leaves open is planned."""
    said = config.parallelism
    shards = said.data_parallel_shard_degree
    return Parallelism(
        tp=said.tensor_parallel_degree if said.tensor_parallel_degree > 1 else None,
        dp_shard=shards if shards > 1 else None,
    )


def _kind(config: Any) -> str:
    return type(config).__qualname__
