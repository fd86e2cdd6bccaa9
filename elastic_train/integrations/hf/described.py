"""A trainer's arguments as a run: the batch, the steps, the task, and what it is kept as."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from ray.train import RunConfig, ScalingConfig
from transformers import EarlyStoppingCallback
from transformers import Trainer as TransformersTrainer
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

import elastic_train as et
from elastic_train.checkpoint.run_directory import RunDirectory
from elastic_train.cluster.driver.launch import absolute
from elastic_train.cluster.ray_train_configs import translated
from elastic_train.cluster.run_reading import records
from elastic_train.data.numbered import numbered
from elastic_train.errors import ConfigError
from elastic_train.integrations.hf.carried import Carried
from elastic_train.integrations.hf.evaluation import Measures
from elastic_train.integrations.hf.given_model import Values, structure_of, write_values
from elastic_train.integrations.hf.given_optimizer import GivenOptimizer
from elastic_train.integrations.hf.loss_kind import Steps, kind_of
from elastic_train.integrations.hf.sample_order import BatchesToEvaluate, Evaluations, InOrder
from elastic_train.integrations.hf.trainer_task import Evaluated, TrainerTask
from elastic_train.observe.journal_records import Record
from elastic_train.storage.fsspec_store import child_url, open_store
from elastic_train.storage.run_requests import ask_to_stop

RUN = "elastic"
"""The run's name, where none is given: its storage is a directory of it below `output_dir`."""
KEPT = 5
"""Checkpoints of the run that stay: the driver writes each one in transformers' way when it hears of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """What is trained, and where it is kept. `measured` begin the names of each evaluated data set's
    metrics."""

    task: TrainerTask
    batch: et.Batch
    steps: Steps
    max_steps: int
    epochs: int
    url: str
    measured: Sequence[str]
    options: Mapping[str, Any]

    def trainer(self, heard: Any, begins: et.ResumeFrom | None) -> et.ElasticTrainer:
        """The run, whose records `heard` is told."""
        options = dict(self.options)
        run: RunConfig = options.pop("run_config")
        run = dataclasses.replace(run, callbacks=[*(run.callbacks or ()), heard])
        return et.ElasticTrainer(
            self.task,
            batch=self.batch,
            max_steps=self.max_steps,
            run_config=run,
            resume_from=begins,
            **options,
        )

    def past(self) -> Iterable[Record]:
        """What the run has done so far."""
        return records(open_store(self.url))

    def kept(self) -> list[tuple[int, str]]:
        """The checkpoints that there are: their steps and paths."""
        return [(stored.step, stored.path) for stored in RunDirectory(open_store(self.url)).commits()]

    def ask_to_stop(self) -> None:
        """At the next step boundary, with a checkpoint."""
        store = open_store(self.url)
        ask_to_stop(
            store, RunDirectory(store).log.newest_term(), "a callback of the script ends the training"
        )


def described(trainer: Any) -> Described:
    """ConfigError where something has no meaning here. Nothing is started; the model's values are written."""
    args, elastic = trainer.args, dict(trainer.elastic)
    devices = elastic.pop("devices")
    size = args.per_device_train_batch_size
    accumulated = args.gradient_accumulation_steps * devices
    dataset = _columns(trainer, numbered(trainer.train_dataset))
    length = len(dataset) // size * size if args.dataloader_drop_last else len(dataset)
    if not length:
        raise ConfigError(
            field="Trainer(train_dataset=...)", problem="it holds no samples, or none of a whole batch."
        )
    steps = Steps(length=length, size=size, batch=size * accumulated)
    max_steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * steps.per_epoch)
    epochs = math.ceil(args.num_train_epochs) if args.max_steps <= 0 else -(-max_steps // steps.per_epoch)
    run = _run_config(trainer, elastic.pop("run_config"))
    url = child_url(absolute(str(run.storage_path)), str(run.name))
    samples = _in_order(trainer, dataset, length, _evaluations(trainer, steps, max_steps))
    collator = TransformersTrainer._get_collator_with_removed_columns(trainer, trainer.data_collator)
    carried = Carried(trainer, decayed=trainer.get_decay_parameter_names(trainer.model))
    carried.built(trainer.model)
    first = [samples[i] for i in range(min(size, length))]
    kind = kind_of(carried, TransformersTrainer._prepare_inputs(trainer, dict(collator(first))))
    evaluated = _evaluated(trainer, max_steps)
    trainer.model.to("cpu")
    task = TrainerTask(
        carried=carried,
        structure=structure_of(trainer.model),
        values=Values(f"{url}-begins"),
        samples=samples,
        collator=collator,
        kind=kind,
        steps=steps,
        devices=devices,
        max_steps=max_steps,
        optimizer=_given(trainer),
        evaluated=evaluated,
        watched=_metric(args) if str(_plain(args.lr_scheduler_type)) == "reduce_lr_on_plateau" else "",
    )
    if not RunDirectory(open_store(url)).ever_committed():
        write_values(trainer.model, f"{url}-begins")
    scaling = elastic.pop("scaling_config")
    if scaling is None:
        gpus = torch.accelerator.is_available() and not args.use_cpu
        scaling = ScalingConfig(num_workers=(1, accumulated), use_gpu=gpus)
    batch = et.Batch(
        global_size=size * accumulated,
        micro_size=size,
        seed=args.seed,
        shuffle=False,
        workers=args.dataloader_num_workers,
        prefetch=(args.dataloader_prefetch_factor or 2) * max(1, args.dataloader_num_workers),
    )
    return Described(
        task=task,
        batch=batch,
        steps=steps,
        max_steps=max_steps,
        epochs=epochs,
        url=url,
        measured=[]
        if evaluated is None
        else [f"eval_{n}_" if n else "eval_" for n in evaluated.measures.names],
        options={
            "scaling_config": scaling,
            "run_config": run,
            "clip_norm": args.max_grad_norm if args.max_grad_norm else None,
            "precision": "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
            "checkpoints": _checkpoints(args, max_steps),
            **elastic,
        },
    )


def _columns(trainer: Any, dataset: Any) -> Any:
    """A Hugging Face data set without the columns that the model doesn't take."""
    if not hasattr(dataset, "column_names") or not hasattr(dataset, "remove_columns"):
        return dataset
    return TransformersTrainer._remove_unused_columns(trainer, dataset, description="training")


def _evaluations(trainer: Any, steps: Steps, max_steps: int) -> Evaluations:
    args = trainer.args
    sets = len(trainer.eval_dataset) if isinstance(trainer.eval_dataset, dict) else 1
    every = 0
    if args.eval_strategy == IntervalStrategy.EPOCH:
        every = steps.per_epoch
    elif args.eval_strategy == IntervalStrategy.STEPS:
        every = _in_steps(args.eval_steps, max_steps)
    return Evaluations(
        sets=sets, every=every, steps_per_epoch=steps.per_epoch, at_start=bool(args.eval_on_start)
    )


def _in_order(trainer: Any, dataset: Any, length: int, evaluations: Evaluations) -> InOrder:
    args = trainer.args
    batch = args.per_device_train_batch_size * args.gradient_accumulation_steps
    strategy = args.train_sampling_strategy
    lengths: Sequence[int] = ()
    if strategy == "group_by_length":
        lengths = TransformersTrainer._get_train_sampler(trainer, dataset).lengths  # type: ignore[union-attr]
    # As accelerate has it: the last seed that torch was given, that of the arguments unless the script gives
    # another one.
    seed = torch.initial_seed() if args.data_seed is None or strategy != "random" else args.data_seed
    return InOrder(
        dataset,
        strategy=strategy,
        seed=seed,
        length=length,
        lengths=lengths,
        batch=batch,
        evaluations=evaluations,
    )


def _given(trainer: Any) -> GivenOptimizer | None:
    if trainer.optimizer is None:
        if trainer.lr_scheduler is not None:
            raise ConfigError(
                field="Trainer(optimizers=...)",
                problem="a schedule is given without the optimizer that it is of.",
            )
        return None
    return GivenOptimizer(trainer.optimizer, trainer.lr_scheduler, trainer.model)


def _evaluated(trainer: Any, max_steps: int) -> Evaluated | None:
    args = trainer.args
    if args.eval_strategy == IntervalStrategy.NO:
        return None
    given = trainer.eval_dataset
    sets = {n: _columns(trainer, d) for n, d in (given if isinstance(given, dict) else {"": given}).items()}
    orders: dict[str, Sequence[int]] = {}
    if args.train_sampling_strategy == "group_by_length":
        orders = {n: list(TransformersTrainer._get_eval_sampler(trainer, d) or ()) for n, d in sets.items()}
    for name, dataset in sets.items():
        _check_labels(trainer, name, dataset)
    metrics = None if args.prediction_loss_only else trainer.compute_metrics
    patience, metric = _patience(trainer), _metric(args)
    better = bool(args.greater_is_better)
    every: int | Literal["epoch"] = "epoch"
    if args.eval_strategy == IntervalStrategy.STEPS:
        every = _in_steps(args.eval_steps, max_steps)
    return Evaluated(
        batches=BatchesToEvaluate(sets, size=args.per_device_eval_batch_size, orders=orders),
        every=every,
        measures=Measures(
            names=list(sets),
            metrics=metrics,
            preprocess=trainer.preprocess_logits_for_metrics,
            include=list(args.include_for_metrics),
            concatenates=args.eval_do_concat_batches,
        ),
        patience=patience,
        watch=metric,
        order="max" if better else "min",
    )


def _check_labels(trainer: Any, name: str, dataset: Any) -> None:
    if not len(dataset):
        raise ConfigError(field="Trainer(eval_dataset=...)", problem=f"{name or 'it'} holds no samples.")
    collator = TransformersTrainer._get_collator_with_removed_columns(trainer, trainer.data_collator)
    batch = collator([dataset[0]])
    missing = [label for label in trainer.label_names if batch.get(label) is None]
    if missing or not trainer.label_names:
        raise ConfigError(
            field="Trainer(eval_dataset=...)",
            problem=f"its samples have no {', '.join(missing) or 'labels'}: there is no loss to evaluate.",
            remedy="Use eval_strategy='no', and predict() after train().",
        )


def _patience(trainer: Any) -> int | None:
    found = [c for c in trainer.callback_handler.callbacks if isinstance(c, EarlyStoppingCallback)]
    if len(found) > 1:
        raise ConfigError(
            field="Trainer(callbacks=...)", problem="there is more than one EarlyStoppingCallback."
        )
    for callback in found:
        if callback.early_stopping_threshold:
            raise ConfigError(
                field="EarlyStoppingCallback(early_stopping_threshold=...)",
                problem="is not supported: whatever is better than the best one counts.",
            )
        return callback.early_stopping_patience
    return None


def _metric(args: Any) -> str:
    name = args.metric_for_best_model
    return "" if name is None else name if name.startswith("eval_") else f"eval_{name}"


def _checkpoints(args: Any, max_steps: int) -> et.Checkpoints:
    every: int | Literal["auto", "epoch"] = "auto"
    if args.save_strategy == SaveStrategy.STEPS:
        every = _in_steps(args.save_steps, max_steps)
    elif args.save_strategy == SaveStrategy.EPOCH:
        every = "epoch"
    best = None
    if args.eval_strategy != IntervalStrategy.NO and (
        args.load_best_model_at_end or args.save_strategy == SaveStrategy.BEST
    ):
        best = _metric(args)
    order: Literal["min", "max"] = "max" if best and args.greater_is_better else "min"
    return et.Checkpoints(every=every, keep=KEPT, best=best, best_order=order, pressure="wait")


def _in_steps(given: float, max_steps: int) -> int:
    """Below 1 it is a share of all steps."""
    return math.ceil(max_steps * given) if given < 1 else int(given)


def _run_config(trainer: Any, given: RunConfig | None) -> RunConfig:
    """With a storage and a name of the script's own, or those below `output_dir`."""
    said = translated(None, given, None, None)
    name = said["name"] if given is not None and given.name else RUN
    storage = said["storage_path"] if given is not None and given.storage_path else trainer.args.output_dir
    return dataclasses.replace(given if given is not None else RunConfig(), name=name, storage_path=storage)


def _plain(value: Any) -> Any:
    return getattr(value, "value", value)
