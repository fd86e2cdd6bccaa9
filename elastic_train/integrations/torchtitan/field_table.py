"""Every field of a torchtitan config: honoured, without effect here, or refused where it says something."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal

from elastic_train.errors import ConfigError
from elastic_train.integrations.torchtitan.refusals import REFUSED

log = logging.getLogger(__name__)
Treatment = Literal["honoured", "ignored", "refused"]
Row = tuple[Treatment, str]

_SPEED = "it changes memory or speed alone"
_PLAN = "the plan is the engine's"
_PIPELINE = "of pipelines, which are refused"
_CONTEXT = "of context parallelism, which is refused"
_LOADED = "of `initial_load_path`, which is refused"
_PATH = "a run is kept under `storage_path` of its RunConfig"
_HISTORY = "a run has a history of its own; give RunConfig a UserCallback for a tracker"
_COMPILED = "of `compile.enable`, which is refused"
_VALIDATED = "of `validator.enable`, which is refused"
_TOLD = "it is about torchtitan's own log"


def _table() -> dict[str, Row]:
    honoured = {
        "model_spec.model": "torchtitan's own modules and values; decoders without experts, attention causal",
        "training.local_batch_size": "a micro-batch",
        "training.global_batch_size": "the batch of a step, which has to be said",
        "training.seq_len": "the length of a window",
        "training.max_norm": "",
        "training.steps": "",
        "training.mixed_precision_param": '`"bfloat16"` is `precision="bf16"`: autocast',
        "optimizer.param_groups": "groups by pattern, of Adam or of AdamW",
        "optimizer.implementation": "all but those whose moments are bfloat16",
        "lr_scheduler.warmup_steps": "torchtitan's own schedule",
        "lr_scheduler.total_steps": "the same",
        "lr_scheduler.decay_ratio": "the same",
        "lr_scheduler.decay_type": "the same",
        "lr_scheduler.min_lr_factor": "the same",
        "parallelism.data_parallel_shard_degree": "constrains plans, where more than 1; else planned",
        "parallelism.tensor_parallel_degree": "the same",
        "parallelism.enable_sequence_parallel": "whether tp divides positions too",
        "checkpoint.enable": "whether the next two say how often and how many; a run has checkpoints anyhow",
        "checkpoint.interval": "",
        "checkpoint.keep_latest_k": "as many as are kept, but for 0",
        "debug.seed": "also of the order of samples",
        "loss": "cross entropy, in chunks or not: the same numbers",
    }
    ignored = {
        "model_spec.name": "a name",
        "model_spec.flavor": "a name",
        "model_spec.parallelize_fn": _PLAN,
        "model_spec.pipelining_fn": _PIPELINE,
        "model_spec.state_dict_adapter": "for files of Hugging Face: import them by `resume_from=`",
        "hf_assets_path": "samples are tokens already",
        "dump_folder": _PATH,
        "profiler": "torch's profiler is not started",
        "metrics": _HISTORY,
        "tokenizer": "samples are tokens already",
        "dataloader": "the data set given to `trainer` takes its place",
        "activation_checkpoint": "plans say what is recomputed",
        "comm": "deadlines are `timing=et.Timing(...)`",
        "training.disable_cuda_graphs": _SPEED,
        "training.mixed_precision_reduce": "gradients are summed in float32",
        "training.gc_freq": _SPEED,
        "training.gc_debug": _SPEED,
        "parallelism.data_parallel_replicate_degree": "machines are `scaling_config=ScalingConfig(...)`",
        "parallelism.fsdp_reshard_after_forward": _SPEED,
        "parallelism.enable_fsdp_symm_mem": _SPEED,
        "parallelism.spmd_backend": _PLAN,
        "parallelism.module_fqns_per_model_part": _PIPELINE,
        "parallelism.pipeline_parallel_first_stage_less_layers": _PIPELINE,
        "parallelism.pipeline_parallel_last_stage_less_layers": _PIPELINE,
        "parallelism.pipeline_parallel_layers_per_stage": _PIPELINE,
        "parallelism.pipeline_parallel_schedule": _PIPELINE,
        "parallelism.pipeline_parallel_schedule_csv": _PIPELINE,
        "parallelism.pipeline_parallel_microbatch_size": _PIPELINE,
        "parallelism.context_parallel_load_balancer": _CONTEXT,
        "parallelism.context_parallel_ptrr_mask_key": _CONTEXT,
        "checkpoint.folder": _PATH,
        "checkpoint.initial_load_model_only": _LOADED,
        "checkpoint.initial_load_in_hf": _LOADED,
        "checkpoint.initial_load_in_hf_quantized": _LOADED,
        "checkpoint.last_save_model_only": "the last checkpoint is like the others",
        "checkpoint.export_dtype": "of `last_save_model_only`",
        "checkpoint.enable_first_step_checkpoint": "a run resumes from its beginning without it",
        "checkpoint.async_mode": "saves are behind training in any case",
        "compile.enable_async_tensor_parallel": _COMPILED,
        "compile.components": _COMPILED,
        "compile.backend": _COMPILED,
        "validator.freq": _VALIDATED,
        "validator.steps": _VALIDATED,
        "validator.dataloader": _VALIDATED,
        "debug.spmd_typechecking": "it checks torchtitan's own parallelism",
        "debug.deterministic_warn_only": "of `debug.deterministic`, which is refused",
        "debug.moe_force_load_balance": "of mixtures of experts, which are refused",
        "debug.print_config": _TOLD,
        "debug.save_config_file": _TOLD,
        "debug.enable_structured_logging": _TOLD,
    }
    rows: dict[str, Row] = {name: ("honoured", why) for name, why in honoured.items()}
    rows |= {name: ("ignored", why) for name, why in ignored.items()}
    for name, _, problem, remedy in REFUSED:
        if name.count(".") <= 1 and name not in rows:
            rows[name] = ("refused", f"{problem} {remedy}".strip().removesuffix("."))
    return rows


FIELDS: Mapping[str, Row] = MappingProxyType(_table())
"""By name, "section.field" or a section as a whole: what becomes of it, and how or why."""


def check_fields(config: Any) -> None:
    """ConfigError for a field that a newer torchtitan has, where it says something; a log for those that have
    no effect."""
    without: list[str] = []
    for name, value, default in _fields(config):
        treatment, _ = FIELDS.get(name, ("unknown", ""))
        if treatment in ("honoured", "refused") or value == default:
            continue
        if treatment == "ignored":
            without.append(name)
            continue
        raise ConfigError(
            field=f"config.{name}",
            problem=f"{value!r} is not supported: this version does not know it.",
            remedy="Leave it at its default.",
        )
    if without:
        log.warning("fields of the config without effect (docs/torchtitan.md): %s", ", ".join(without))


def names_of(config: Any) -> list[str]:
    """Of all fields, as the table has them."""
    return [name for name, _, _ in _fields(config)]


def _fields(config: Any) -> Iterator[tuple[str, Any, Any]]:
    """Name, value and default."""
    for outer in dataclasses.fields(config):
        section = getattr(config, outer.name)
        if outer.name in FIELDS or not dataclasses.is_dataclass(section):
            yield outer.name, section, _default(outer)
            continue
        for inner in dataclasses.fields(section):
            yield f"{outer.name}.{inner.name}", getattr(section, inner.name), _default(inner)


def _default(field: dataclasses.Field[Any]) -> Any:
    made = field.default_factory
    return field.default if made is dataclasses.MISSING else made()
