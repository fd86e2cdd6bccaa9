"""`fit` and `trainer`: Lightning's arguments as a run of this library, or refused by name."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from elastic_train.api import ElasticTrainer
from elastic_train.config import Batch, Parallelism, Precision, ResumeFrom
from elastic_train.errors import ConfigError
from elastic_train.integrations.lightning.attached import Settings, View, attach
from elastic_train.integrations.lightning.callbacks import Translated, translated
from elastic_train.integrations.lightning.checkpoint_file import take_values, write_files
from elastic_train.integrations.lightning.data import Loaded, Source
from elastic_train.integrations.lightning.hooks import check_hooks, overridden
from elastic_train.integrations.lightning.loop import PREFIX, Began, Copies, Fit
from elastic_train.integrations.lightning.optimizers import configured
from elastic_train.train.model.optimizer import names_of

if TYPE_CHECKING:
    from elastic_train.cluster.driver.result import Result

PRECISIONS: Mapping[Any, Precision] = {
    **dict.fromkeys((None, 32, "32", "32-true"), "fp32"),
    **dict.fromkeys(("bf16", "bf16-mixed"), "bf16"),
    **dict.fromkeys((16, "16", "16-mixed"), "fp16"),
    **dict.fromkeys((64, "64", "64-true"), "fp64"),
}
_MACHINES = "Say scaling_config=ScalingConfig(num_workers=(1, 4), use_gpu=...): plans are chosen from that."
_SHOWN = "A run shows itself in the terminal, and fit(page=8420) serves a page."
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        ("accelerator", "devices", "num_nodes", "strategy", "use_distributed_sampler"), _MACHINES
    ),
    "sync_batchnorm": "Statistics are of a micro-batch, under every plan.",
    "logger": "Metrics are in the run's storage; a UserCallback of RunConfig hears of them.",
    "log_every_n_steps": "Each step is in the run's history.",
    "default_root_dir": "Say run_config=RunConfig(storage_path=..., name=...).",
    "enable_checkpointing": "A run always has checkpoints; say checkpoints=Checkpoints(...).",
    "enable_progress_bar": f"{_SHOWN} fit(quiet=True) shows nothing.",
    "enable_model_summary": "Leave it out.",
    "min_epochs": "Give EarlyStopping a patience of as many epochs.",
    "min_steps": "Give EarlyStopping a patience.",
    "max_time": "Give max_steps or max_epochs.",
    **dict.fromkeys(
        ("limit_train_batches", "limit_val_batches", "overfit_batches", "fast_dev_run"),
        "Give a data set of the size that is wanted, and max_steps.",
    ),
    **dict.fromkeys(("limit_test_batches", "limit_predict_batches"), "Test with Lightning's own Trainer."),
    "num_sanity_val_steps": "The first micro-batch is tried before it counts; leave it out.",
    "reload_dataloaders_every_n_epochs": "A data set with set_epoch(epoch) is told the epoch.",
    "deterministic": "Order, masks and plans are functions of the seed; leave it out.",
    "detect_anomaly": "A gradient that is not finite ends the run after limits=Limits(not_finite=...).",
    "inference_mode": "Evaluations run without gradients; leave it out.",
    **dict.fromkeys(("benchmark", "profiler", "plugins", "barebones", "model_registry"), "Leave it out."),
    "enable_autolog_hparams": "Leave it out.",
}
"""Arguments of Lightning's Trainer that have no meaning here: what to do instead."""
OF_FIT = ("address", "local_nodes", "quiet", "verbose", "prints", "page")


class LightningTrainer(ElasticTrainer):
    """An ElasticTrainer of a LightningModule. `fit` gives the module the values that were trained."""

    def __init__(self, fit: Fit, module: Any, translated: Translated, **options: Any) -> None:
        super().__init__(fit, **options)
        self._module, self._translated, self._settings = module, translated, fit.settings

    def fit(self, **options: Any) -> Result:
        """As ElasticTrainer.fit. A ModelCheckpoint with a dirpath gets its files when the run is over."""
        result = super().fit(**options)
        if result.outcome == "finished" and self._module is not None:
            take_values(result, self._module)
        if self._translated.files is not None and self._translated.files.dirpath is not None:
            write_files(result, self._module, self._translated.files, self._settings.steps_per_epoch)
        return result


def fit(model: Any, train_dataloaders: Any = None, val_dataloaders: Any = None, **options: Any) -> Result:
    """Train a LightningModule to its last step, through whatever happens to the machines.

    Takes what `trainer` takes, and what `ElasticTrainer.fit` does. The module has the trained values then.
    """
    own = {name: options.pop(name) for name in OF_FIT if name in options}
    return trainer(model, train_dataloaders, val_dataloaders, **options).fit(**own)


def trainer(
    model: Any,
    train_dataloaders: Any = None,
    val_dataloaders: Any = None,
    datamodule: Any = None,
    ckpt_path: str | os.PathLike[str] | None = None,
    *,
    max_epochs: int | None = None,
    max_steps: int = -1,
    accumulate_grad_batches: int = 1,
    gradient_clip_val: float | None = None,
    gradient_clip_algorithm: str | None = None,
    check_val_every_n_epoch: int | None = 1,
    val_check_interval: int | float | None = None,
    precision: str | int | None = None,
    callbacks: Any = None,
    seed: int = 0,
    micro_size: int | None = None,
    **options: Any,
) -> LightningTrainer:
    """A trainer of a LightningModule, or of a function that makes one, with Lightning's own arguments.

    A batch of the data loader, times `accumulate_grad_batches`, is that of an optimizer step; `micro_size` of
    its samples go to a `training_step` at a time, the data loader's `batch_size` unless it is said. The loss
    is a mean over them. `seed` orders samples and seeds what is drawn. `ckpt_path` is a `.ckpt` to go on
    from. All other `options` are those of ElasticTrainer. ConfigError names what is not supported.
    """
    for name in options:
        if name in REFUSED:
            raise ConfigError(
                field=f"lightning.fit({name}=...)", problem="has no effect here.", remedy=REFUSED[name]
            )
    if _is_datamodule(train_dataloaders):
        train_dataloaders, datamodule = None, train_dataloaders
    made, module = _made(model)
    check_hooks(module)
    source = Source(copy.deepcopy(module), datamodule, train_dataloaders, val_dataloaders)
    loaded, held_out = source.looked_at()
    automatic = bool(module.automatic_optimization)
    if not automatic and (accumulate_grad_batches != 1 or gradient_clip_val is not None):
        raise ConfigError(
            field="lightning.fit(accumulate_grad_batches=..., gradient_clip_val=...)",
            problem="with manual optimization they are the module's own.",
            remedy="Use a larger batch_size, and self.clip_gradients before optimizer.step().",
        )
    batch = _batch(loaded, accumulate_grad_batches, micro_size, seed, options.get("scaling_config"))
    settings = _settings(
        loaded,
        batch,
        max_epochs=max_epochs,
        max_steps=max_steps,
        accumulate=accumulate_grad_batches,
        clip=gradient_clip_val,
        algorithm=gradient_clip_algorithm,
        every_epochs=check_val_every_n_epoch,
        interval=val_check_interval,
        validates=bool(held_out) and overridden(module, "validation_step"),
    )
    said = translated(
        _callbacks(module, callbacks),
        steps_per_epoch=settings.steps_per_epoch,
        each_epoch=val_check_interval in (None, 1.0) and check_val_every_n_epoch == 1,
    )
    if said.checkpoints is not None:
        if options.get("checkpoints") is not None:
            raise ConfigError(
                field="lightning.fit(checkpoints=...)", problem="a ModelCheckpoint is given too."
            )
        options["checkpoints"] = said.checkpoints
    by_engine = settings.clip if settings.clip_algorithm == "norm" else None
    if overridden(module, "configure_gradient_clipping"):
        by_engine = None
    return LightningTrainer(
        Fit(made, source, settings, said.stopping, _began(ckpt_path)),
        None if callable(model) and module is not model else model,
        said,
        batch=batch,
        max_steps=settings.max_steps,
        clip_norm=by_engine,
        precision=_precision(precision),
        parallelism=_parallelism(options.pop("parallelism", None), automatic=automatic),
        resume_from=_resume(ckpt_path, module, settings, source),
        **options,
    )


def _made(model: Any) -> tuple[Callable[[], Any], Any]:
    """What makes the module in a worker, and one to look at."""
    if hasattr(model, "training_step") and not isinstance(model, type):
        return Copies(model), model
    if not callable(model):
        raise ConfigError(
            field="lightning.fit(model)", problem=f"{type(model).__name__} is no LightningModule."
        )
    return model, model()


def _is_datamodule(given: Any) -> bool:
    return any(cls.__name__ == "LightningDataModule" for cls in type(given).__mro__)


def _batch(loaded: Loaded, accumulate: int, micro_size: int | None, seed: int, scaling: Any) -> Batch:
    if not isinstance(accumulate, int) or accumulate < 1:
        raise ConfigError(
            field="lightning.fit(accumulate_grad_batches=...)",
            problem=f"must be a whole number from 1 on, got {accumulate!r}.",
        )
    micro, whole = micro_size or loaded.batch_size, loaded.batch_size * accumulate
    workers = getattr(scaling, "num_workers", 1)
    most = max(workers) if isinstance(workers, tuple) else workers
    if micro_size is None and isinstance(most, int) and most > accumulate:
        raise ConfigError(
            field="lightning.fit(micro_size=...)",
            problem=f"a step of {whole} samples in micro-batches of {micro} is work for {accumulate} of "
            f"{most} workers.",
            remedy=f"Say how many samples a training_step gets at a time, such as "
            f"{max(1, whole // (2 * most))}; its loss has to be a mean over them.",
        )
    return Batch(
        global_size=whole,
        micro_size=micro,
        seed=seed,
        shuffle=loaded.shuffle,
        drop_last=loaded.drop_last,
        workers=loaded.workers,
        prefetch=loaded.prefetch,
    )


def _settings(
    loaded: Loaded,
    batch: Batch,
    *,
    max_epochs: int | None,
    max_steps: int,
    accumulate: int,
    clip: float | None,
    algorithm: str | None,
    every_epochs: int | None,
    interval: int | float | None,
    validates: bool,
) -> Settings:
    samples = len(loaded.dataset)
    rounded = math.floor if batch.drop_last else math.ceil
    steps, batches = rounded(samples / batch.global_size), rounded(samples / loaded.batch_size)
    if batch.drop_last:
        batches = steps * accumulate
    if steps < 1:
        raise ConfigError(field="train_dataloaders", problem=f"{samples} samples are less than one batch.")
    if max_epochs in (None, -1) and max_steps == -1:
        if max_epochs == -1:
            raise ConfigError(
                field="lightning.fit(max_epochs=-1)",
                problem="a run has an end.",
                remedy="Give max_steps; the same command with a larger number goes on.",
            )
        max_epochs = 1000  # as Lightning's Trainer
    wanted = [n for n in ((max_epochs or -1) * steps, max_steps) if n >= 0]
    algorithm = "norm" if algorithm is None else str(algorithm).lower()
    if algorithm not in ("norm", "value"):
        raise ConfigError(
            field="lightning.fit(gradient_clip_algorithm=...)",
            problem=f"must be 'norm' or 'value', got {algorithm!r}.",
        )
    last = samples - (steps - 1) * batch.global_size
    return Settings(
        max_epochs=max_epochs if max_epochs not in (None, -1) else math.ceil(max_steps / steps),
        max_steps=min(wanted),
        steps_per_epoch=steps,
        loader_batch=loaded.batch_size,
        global_size=batch.global_size,
        micro_size=batch.micro_size,
        batches=batches,
        last_size=min(last, batch.global_size),
        accumulate=accumulate,
        clip=clip or None,
        clip_algorithm=algorithm,
        validate_epochs=every_epochs or 0,
        validate_batches=_validation_interval(interval, batches, accumulate) if validates else 0,
    )


def _validation_interval(interval: int | float | None, batches: int, accumulate: int) -> int:
    """In batches of the data loader."""
    given = 1.0 if interval is None else interval
    field = "lightning.fit(val_check_interval=...)"
    if isinstance(given, bool) or not isinstance(given, int | float) or given <= 0:
        raise ConfigError(field=field, problem=f"must be a share of an epoch or a number, got {given!r}.")
    found = max(1, int(batches * given)) if isinstance(given, float) else given
    if isinstance(given, float) and given > 1:
        raise ConfigError(
            field=field, problem=f"{given} is more than an epoch; a number of batches is an int."
        )
    if found != batches and found % accumulate:
        raise ConfigError(
            field=field,
            problem=f"{found} batches are no whole number of steps of {accumulate}.",
            remedy="A validation is of what a step left.",
        )
    return found


def _callbacks(module: Any, given: Any) -> Sequence[Any]:
    several = list(given) if isinstance(given, list | tuple) else [] if given is None else [given]
    if overridden(module, "configure_callbacks"):
        own = module.configure_callbacks()
        several += list(own) if isinstance(own, list | tuple) else [own]
    return several


def _precision(given: str | int | None) -> Precision:
    if given not in PRECISIONS:
        raise ConfigError(
            field="lightning.fit(precision=...)",
            problem=f"{given!r} is not supported.",
            remedy='"32-true", "bf16-mixed", "16-mixed" and "64-true" are.',
        )
    return PRECISIONS[given]


def _began(path: str | os.PathLike[str] | None) -> Began | None:
    if path is None:
        return None
    kept = torch.load(os.fspath(path), map_location="cpu", weights_only=True)
    return Began(step=int(kept["global_step"]), schedulers=list(kept.get("lr_schedulers") or ()))


def _parallelism(given: Parallelism | None, *, automatic: bool) -> Parallelism:
    said = given or Parallelism()
    if automatic:
        return said
    if (said.dp_shard or 1) > 1:
        raise ConfigError(
            field="parallelism.dp_shard",
            problem="with manual optimization parameters are whole: forwards of several micro-batches stand "
            "still at once.",
            remedy="Leave it out, or write a loop (docs/loops.md).",
        )
    return Parallelism(**{**{n: getattr(said, n) for n in said.__slots__}, "dp_shard": 1})


def _resume(
    path: str | os.PathLike[str] | None, module: Any, settings: Settings, source: Source
) -> ResumeFrom | None:
    if path is None:
        return None
    looked_at = copy.deepcopy(module)
    attach(looked_at, View(settings, looked_at, source.datamodule))
    made = configured(looked_at.configure_optimizers(), automatic=looked_at.automatic_optimization)
    named = dict(looked_at.named_parameters())
    names = tuple(name for each in made.optimizers for group in names_of(each, named) for name in group)
    rule = {"select": "{name...}", "to": f"{PREFIX}{{name...}}"}
    return ResumeFrom(url=os.fspath(path), specification={"rule": [rule]}, copy=True, names=names)
