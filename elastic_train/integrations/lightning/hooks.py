"""Which of Lightning's hooks run, and which are refused by name, with the reason.

Refused is what would depend on which worker computes which samples, or be called at a time that there is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from elastic_train.errors import ConfigError

_SHARE = (
    "gradients there are those of some samples, and not yet of the global batch",
    "Use on_before_optimizer_step, where they are those of the mean over it.",
)
_OWN_BACKWARD = ("the backward of a step is the engine's", "Set automatic_optimization = False.")
_ENGINE_MOVES = (
    "the engine moves micro-batches",
    "Change them in on_after_batch_transfer, which is called, or in collate_fn.",
)
_MODES = ("the engine changes modes around an evaluation", "Leave it out.")

REFUSED: Mapping[str, tuple[str, str]] = {
    "on_after_backward": _SHARE,
    "on_before_zero_grad": (
        "gradients are dropped by the engine",
        "Use on_train_batch_end, which is called once after each committed step.",
    ),
    "backward": _OWN_BACKWARD,
    "optimizer_step": (
        "the update is voted on by all workers, so that it is there for all or for none",
        "Warm a rate up by a scheduler with the interval 'step'; edit gradients in on_before_optimizer_step.",
    ),
    "optimizer_zero_grad": ("gradients are dropped by the engine", "Leave it out."),
    "transfer_batch_to_device": _ENGINE_MOVES,
    "on_before_batch_transfer": _ENGINE_MOVES,
    "on_validation_batch_start": (
        "which batches a worker evaluates depends on the plan",
        "Do it in validation_step.",
    ),
    "on_validation_batch_end": (
        "which batches a worker evaluates depends on the plan",
        "Do it in validation_step.",
    ),
    "on_validation_model_zero_grad": ("gradients are dropped by the engine", "Leave it out."),
    "on_validation_model_eval": _MODES,
    "on_validation_model_train": _MODES,
    "configure_sharded_model": ("it was replaced", "Use configure_model."),
    "on_exception": ("a run goes on after a failure of a machine", "Leave it out."),
    "state_dict": ("names of tensors are those of the modules", "Leave it out."),
    "load_state_dict": ("names of tensors are those of the modules", "Leave it out."),
}
"""By hook: why it is refused, and what to do."""
_NUMBERED = ("which samples a step has follows from its number", "Leave it out.")
OF_DATA: Mapping[str, tuple[str, str]] = {"state_dict": _NUMBERED, "load_state_dict": _NUMBERED}
"""Where the reason is another one for a LightningDataModule."""

HONOURED = (
    *("configure_model", "configure_optimizers", "configure_callbacks", "prepare_data", "setup", "teardown"),
    *("train_dataloader", "val_dataloader", "on_after_batch_transfer"),
    *("on_fit_start", "on_fit_end", "on_train_start", "on_train_end"),
    *("on_train_epoch_start", "on_train_epoch_end", "on_train_batch_start", "on_train_batch_end"),
    *("training_step", "on_before_backward", "on_before_optimizer_step", "configure_gradient_clipping"),
    *("lr_scheduler_step", "validation_step", "on_validation_start", "on_validation_end"),
    *("on_validation_epoch_start", "on_validation_epoch_end", "on_save_checkpoint", "on_load_checkpoint"),
)
"""Those that are called."""


def base_of(module: Any, base: str = "LightningModule") -> type:
    """Lightning's own class of a module; ConfigError where it has none."""
    for cls in type(module).__mro__:
        if cls.__name__ == base and cls.__module__.split(".")[0] in ("lightning", "pytorch_lightning"):
            return cls
    raise ConfigError(
        field="lightning.fit(module)" if base == "LightningModule" else "lightning.fit(datamodule=...)",
        problem=f"{type(module).__name__} is no {base}.",
        remedy="Give one, or a function that makes it." if base == "LightningModule" else "",
    )


def overridden(module: Any, name: str, base: str = "LightningModule") -> bool:
    """Whether the module's own code defines a hook."""
    theirs = base_of(module, base)
    own = getattr(type(module), name, None)
    return name in vars(module) or (own is not None and own is not getattr(theirs, name, None))


def of_data(datamodule: Any, name: str) -> bool:
    """Whether there is a LightningDataModule that defines a hook."""
    return datamodule is not None and overridden(datamodule, name, "LightningDataModule")


def transferred(module: Any, batch: Any, loader: int = 0) -> Any:
    """A micro-batch as `on_after_batch_transfer` leaves it: the data module's, if it has one, else the
    module's."""
    datamodule = module.trainer.datamodule
    owner = datamodule if of_data(datamodule, "on_after_batch_transfer") else module
    return owner.on_after_batch_transfer(batch, loader)


def check_data_hooks(datamodule: Any) -> None:
    """ConfigError for a hook of a data module that nobody would call."""
    for name in REFUSED:
        if of_data(datamodule, name):
            problem, remedy = OF_DATA.get(name, REFUSED[name])
            raise ConfigError(
                field=f"{type(datamodule).__name__}.{name}", problem=f"{problem}.", remedy=remedy
            )


def check_hooks(module: Any) -> None:
    """ConfigError for what nobody would call, or what could not be exact."""
    for name, (problem, remedy) in REFUSED.items():
        if overridden(module, name):
            raise ConfigError(field=f"{type(module).__name__}.{name}", problem=f"{problem}.", remedy=remedy)
    if not overridden(module, "training_step"):
        raise ConfigError(
            field=f"{type(module).__name__}.training_step", problem="the module does not define it."
        )
    if not overridden(module, "configure_optimizers"):
        raise ConfigError(
            field=f"{type(module).__name__}.configure_optimizers", problem="the module does not define it."
        )
    for path, name in _metrics(module):
        raise ConfigError(
            field=f"module.{path}",
            problem=f"{name} keeps a state from batch to batch, and which batches a worker gets depends on "
            "the plan.",
            remedy="Log the metric of a batch, computed by torchmetrics.functional: means over the samples "
            "of all workers are made of it.",
        )


def _metrics(module: Any) -> Iterator[tuple[str, str]]:
    for path, inner in module.named_modules():
        for cls in type(inner).__mro__:
            if cls.__name__ in ("Metric", "MetricCollection") and cls.__module__.startswith("torchmetrics"):
                yield path, type(inner).__name__
                break
