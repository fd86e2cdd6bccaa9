"""Every field of TrainingArguments: honoured, without effect here, or refused where it isn't its default."""

from __future__ import annotations

import dataclasses
import enum
import logging
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, Literal

from transformers import TrainingArguments

from elastic_train.errors import ConfigError

log = logging.getLogger(__name__)
Treatment = Literal["honoured", "ignored", "refused"]
Row = tuple[Treatment, str]

_OURS = "the engine adds gradients up in its own way"
_HUB = "nothing is pushed; call push_to_hub of the saved model after train()"
_PLAN = "the plan is the engine's: Trainer(parallelism=et.Parallelism(...))"
_MEMORY = "it changes memory or speed alone"
_NOISE = "what it draws would depend on the plan"


def _table() -> dict[str, Row]:
    honoured = {
        "output_dir": "`checkpoint-N` go there, and the run's own storage to `elastic` below it",
        "per_device_train_batch_size": "size of a micro-batch",
        "gradient_accumulation_steps": "times `devices` micro-batches are a batch",
        "num_train_epochs": "",
        "max_steps": "",
        "learning_rate": "",
        "lr_scheduler_type": "all but `greedy`",
        "lr_scheduler_kwargs": "",
        "warmup_steps": "a number of steps, or a share of them below 1",
        "optim": "those of torch, and `adafactor`",
        "optim_args": "",
        "weight_decay": "not for the parameters that transformers leaves out",
        "adam_beta1": "",
        "adam_beta2": "",
        "adam_epsilon": "",
        "max_grad_norm": "",
        "label_smoothing_factor": "",
        "bf16": "autocast; parameters stay as they are",
        "fp16": "autocast and a loss scale",
        "activation_checkpointing": "",
        "activation_checkpointing_kwargs": "",
        "gradient_checkpointing": "the older name",
        "gradient_checkpointing_kwargs": "",
        "use_cache": "",
        "logging_strategy": "",
        "logging_steps": "",
        "logging_first_step": "",
        "log_level": "of the driver",
        "disable_tqdm": "",
        "report_to": "callbacks of the driver",
        "run_name": "",
        "project": "",
        "trackio_space_id": "",
        "trackio_bucket_id": "",
        "trackio_static_space_id": "",
        "eval_strategy": "",
        "eval_steps": "",
        "per_device_eval_batch_size": "",
        "prediction_loss_only": "",
        "eval_on_start": "in the driver, before the run",
        "eval_do_concat_batches": "",
        "include_for_metrics": "",
        "save_only_model": "a `checkpoint-N` has weights and trainer state; optimizers are in the run's own",
        "save_strategy": "`no` writes no `checkpoint-N`; the run's own checkpoints are written in any case",
        "save_steps": "",
        "save_total_limit": "",
        "load_best_model_at_end": "",
        "metric_for_best_model": "",
        "greater_is_better": "",
        "seed": "",
        "data_seed": "",
        "use_cpu": "no GPU is asked for",
        "dataloader_drop_last": "",
        "dataloader_num_workers": "processes of each worker",
        "dataloader_prefetch_factor": "",
        "remove_unused_columns": "",
        "label_names": "",
        "train_sampling_strategy": "`random`, `sequential`, `group_by_length`",
        "length_column_name": "",
        "do_train": "the script's own",
        "do_eval": "the script's own",
        "do_predict": "the script's own",
        "resume_from_checkpoint": "the script's own; see `train(resume_from_checkpoint=...)`",
    }
    ignored = {
        "torch_empty_cache_steps": _MEMORY,
        "log_on_each_node": "one process logs",
        "log_level_replica": "one process logs",
        "logging_nan_inf_filter": "a step that is not finite is skipped and told as NaN",
        "eval_use_gather_object": "predictions are gathered as objects in any case",
        "eval_accumulation_steps": "predictions go to the host after each batch",
        "save_on_each_node": "one process saves",
        "dataloader_pin_memory": _MEMORY,
        "dataloader_persistent_workers": "they persist",
        "ddp_find_unused_parameters": _OURS,
        "ddp_bucket_cap_mb": _OURS,
        "ddp_broadcast_buffers": _OURS,
        "ddp_static_graph": _OURS,
        "ddp_backend": _OURS,
        "ddp_timeout": "deadlines are Trainer(timing=et.Timing(...))",
        "local_rank": "there are no ranks in the script",
        "hub_token": _HUB,
        "hub_private_repo": _HUB,
        "hub_model_id": _HUB,
        "hub_strategy": _HUB,
        "hub_always_push": _HUB,
        "hub_revision": _HUB,
    }
    refused = {
        "optim_target_modules": "optimizers that look into the model are not supported",
        "average_tokens_across_devices": "tokens are counted over the global batch, whatever the devices",
        "bf16_full_eval": "evaluations in a run compute as training does; use bf16",
        "fp16_full_eval": "evaluations in a run compute as training does; use fp16",
        "tf32": "it would be set in the driver and not in the workers",
        "torch_compile": "hand over a model whose blocks are compiled by `model.compile()`, in `model_init`",
        "torch_compile_backend": "see torch_compile",
        "torch_compile_mode": "see torch_compile",
        "use_liger_kernel": "apply it to the model in the script",
        "liger_kernel_config": "apply it to the model in the script",
        "neftune_noise_alpha": _NOISE,
        "auto_find_batch_size": "the batch is part of the training problem; the engine divides it by memory",
        "include_num_input_tokens_seen": "input tokens are not counted",
        "eval_delay": "evaluations begin with the first one that is due",
        "batch_eval_metrics": "compute_metrics gets all predictions at once",
        "enable_jit_checkpoint": "a SIGTERM to the job, and a drain, save in any case",
        "push_to_hub": _HUB,
        "ignore_data_skip": "which samples a step has follows from its number",
        "restore_callback_states_from_checkpoint": "callbacks begin anew, with the logs of the run",
        "full_determinism": "a run is repeatable under the same plans as it is",
        "accelerator_config": "there is no accelerator in a worker",
        "parallelism_config": _PLAN,
        "dataloader_multiprocessing_context": "processes of a worker are started in its own way",
        "dataloader_in_order": "micro-batches come in their order",
        "fsdp": _PLAN,
        "fsdp_config": _PLAN,
        "deepspeed": _PLAN,
        "debug": "it hooks into a training loop that isn't there",
        "skip_memory_metrics": "memory would be that of the driver",
    }
    rows: dict[str, Row] = {name: ("honoured", why) for name, why in honoured.items()}
    rows |= {name: ("ignored", why) for name, why in ignored.items()}
    rows |= {name: ("refused", why) for name, why in refused.items()}
    return rows


FIELDS: Mapping[str, Row] = MappingProxyType(_table())
"""By name: what becomes of it, and how or why."""
REFUSED_VALUES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "train_sampling_strategy": {
            "batch_rebalance": "its micro-batches have no fixed number of samples; use group_by_length"
        },
        "lr_scheduler_type": {
            "greedy": "it follows the loss in a state of its own; use reduce_lr_on_plateau"
        },
    }
)
SET_BY_TRANSFORMERS = frozenset({"dataloader_pin_memory", "local_rank"})
"""Fields without effect that it changes by itself, as for `use_cpu`."""
OPTIMIZERS = frozenset(
    {
        *(
            "adamw_torch",
            "adamw_torch_fused",
            "adamw_torch_npu_fused",
            "adafactor",
            "sgd",
            "adagrad",
            "rmsprop",
        ),
        "stable_adamw",
    }
)
"""Values of `optim` that are tried here: optimizers of torch and Adafactor. Others need a library or the
model."""


def check_arguments(args: TrainingArguments) -> None:
    """ConfigError, by the name of the argument, for what has no meaning here; a log for what has no
    effect."""
    default = _default()
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        treatment, why = FIELDS.get(field.name, ("refused", "this version does not know it"))
        if treatment == "honoured" or _plain(value) == _plain(getattr(default, field.name, field.default)):
            continue
        if treatment == "ignored":
            if field.name not in SET_BY_TRANSFORMERS:
                log.warning("TrainingArguments.%s has no effect: %s", field.name, why)
            continue
        raise _refused(field.name, value, why)
    for name, values in REFUSED_VALUES.items():
        value = str(_plain(getattr(args, name)))
        if value in values:
            raise _refused(name, value, values[value])
    if (optim := str(_plain(args.optim))) not in OPTIMIZERS:
        raise _refused(
            "optim", optim, f"known are {', '.join(sorted(OPTIMIZERS))}; others by optimizer_cls_and_kwargs"
        )


@cache
def _default() -> TrainingArguments:
    """What fields are after transformers has completed those that nobody set."""
    return TrainingArguments(output_dir="unused")


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, enum.Enum) else value


def _refused(name: str, value: Any, why: str) -> ConfigError:
    return ConfigError(
        field=f"TrainingArguments.{name}", problem=f"{_plain(value)!r} is not supported.", remedy=f"{why}."
    )
