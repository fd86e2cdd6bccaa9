"""What a LightningModule reaches through itself: its trainer, its optimizers, and `self.log`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from elastic_train.errors import ConfigError
from elastic_train.integrations.lightning.hooks import base_of
from elastic_train.integrations.lightning.logged import Logged, log
from elastic_train.integrations.lightning.optimizers import Schedule


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Settings:
    """Of a fit. Batches are those of the data loader, of `loader_batch` samples."""

    max_epochs: int
    max_steps: int
    steps_per_epoch: int
    loader_batch: int
    global_size: int
    micro_size: int
    batches: int  # of an epoch
    last_size: int  # samples of its last step
    accumulate: int
    clip: float | None
    clip_algorithm: str
    validate_epochs: int  # every how many
    validate_batches: int  # within an epoch, or of all where validate_epochs is 0


class View:
    """`self.trainer` of a module: what there is of it here. Its slots are no state of the module."""

    __slots__ = (
        "callback_metrics",
        "context",
        "datamodule",
        "hooked",
        "lightning_module",
        "manual",
        "manual_schedulers",
        "optimizers",
        "schedules",
        "settings",
        "should_stop",
        "state",
    )

    def __init__(self, settings: Settings, module: Any, datamodule: Any) -> None:
        self.settings, self.lightning_module, self.datamodule = settings, module, datamodule
        self.optimizers: list[Any] = []
        self.schedules: list[Schedule] = []
        self.callback_metrics: dict[str, torch.Tensor] = {}
        self.context: Any = None  # none while it is declared
        self.manual: Any = None
        self.manual_schedulers: list[Any] = []
        self.hooked = Logged(on_step=True, on_epoch=False)  # what hooks of the step under way log
        self.should_stop = False
        self.state = "training"

    @property
    def global_step(self) -> int:
        return self.context.at if self.context is not None else 0

    @property
    def current_epoch(self) -> int:
        """Of the step under way; while a step's end is looked at, of that step."""
        done = self.global_step - (1 if self.state != "training" and self.global_step else 0)
        return done // self.settings.steps_per_epoch

    @property
    def lr_scheduler_configs(self) -> list[Schedule]:
        return self.schedules

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    @property
    def global_rank(self) -> int:
        return self.context.rank if self.context is not None else 0

    @property
    def world_size(self) -> int:
        return self.context.world_size if self.context is not None else 1

    @property
    def training(self) -> bool:
        return self.state != "validating"

    @property
    def validating(self) -> bool:
        return self.state == "validating"

    @property
    def max_epochs(self) -> int:
        return self.settings.max_epochs

    @property
    def max_steps(self) -> int:
        return self.settings.max_steps

    @property
    def estimated_stepping_batches(self) -> int:
        return self.settings.max_steps

    @property
    def num_training_batches(self) -> int:
        return self.settings.batches

    @property
    def accumulate_grad_batches(self) -> int:
        return self.settings.accumulate

    @property
    def gradient_clip_val(self) -> float | None:
        return self.settings.clip

    @property
    def gradient_clip_algorithm(self) -> str:
        return self.settings.clip_algorithm

    @property
    def logged_metrics(self) -> dict[str, torch.Tensor]:
        return self.callback_metrics

    @property
    def sanity_checking(self) -> bool:
        return False

    @property
    def logger(self) -> None:
        return None

    @property
    def loggers(self) -> list[Any]:
        return []

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ConfigError(
            field=f"self.trainer.{name}",
            problem="there is no Lightning Trainer behind the module.",
            remedy="Use current_epoch, global_step, max_epochs, max_steps, estimated_stepping_batches, "
            "num_training_batches, optimizers, callback_metrics, datamodule or is_global_zero.",
        )


class Attached:
    """In front of a module's own class: methods that ask the trainer in Lightning's."""

    _trainer: Any

    def log(self, name: str, value: Any, *args: Any, **said: Any) -> None:
        names = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx")
        log(name, value, **dict(zip(names, args, strict=False)), **said)

    def log_dict(self, dictionary: Any, *args: Any, **said: Any) -> None:
        names = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx")
        for name, value in dict(dictionary).items():
            log(str(name), value, **dict(zip(names, args, strict=False)), **said)

    def print(self, *args: Any, **said: Any) -> None:
        if self._trainer.is_global_zero:
            print(*args, **said)  # noqa: T201 - what the module was told to print

    def all_gather(self, *args: Any, **said: Any) -> NoReturn:
        raise ConfigError(
            field="self.all_gather",
            problem="how many workers there are depends on the plan.",
            remedy="Log a value: it is put together over all workers.",
        )

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        found = self._trainer.optimizers
        return found[0] if len(found) == 1 else found

    def lr_schedulers(self) -> Any:
        view = self._trainer
        inside = view.manual is not None
        found = view.manual_schedulers if inside else [each.scheduler for each in view.schedules]
        return None if not found else found[0] if len(found) == 1 else found

    def manual_backward(self, loss: Any, *args: Any, **said: Any) -> None:
        self._manual("manual_backward").backward(loss, *args, **said)

    def toggle_optimizer(self, optimizer: Any) -> None:
        self._manual("toggle_optimizer").now.toggle(optimizer)

    def untoggle_optimizer(self, optimizer: Any) -> None:
        self._manual("untoggle_optimizer").now.untoggle()

    def clip_gradients(
        self,
        optimizer: Any,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        value = self._trainer.gradient_clip_val if gradient_clip_val is None else gradient_clip_val
        algorithm = str(gradient_clip_algorithm or self._trainer.gradient_clip_algorithm)
        manual = self._trainer.manual
        if manual is not None:
            manual.clip(optimizer, value, algorithm)
        elif value:
            clip(optimizer, value, algorithm)

    def _manual(self, what: str) -> Any:
        manual = self._trainer.manual
        if manual is None:
            raise ConfigError(
                field=f"self.{what}",
                problem="it is called where no training_step of manual optimization is under way.",
                remedy="Set automatic_optimization = False.",
            )
        return manual


def attach(module: Any, view: View) -> None:
    """Have the module, and LightningModules within it, ask `view`."""
    base_of(module)
    for inner in module.modules():
        if hasattr(inner, "_trainer") and hasattr(inner, "training_step"):
            cls = type(inner)
            if not isinstance(inner, Attached):
                inner.__class__ = type(
                    cls.__name__,
                    (Attached, cls),
                    {"__module__": cls.__module__, "__qualname__": cls.__qualname__},
                )
            inner._trainer = view


def clip(optimizer: Any, value: float, algorithm: str) -> None:
    """The gradients of an optimizer, as they are now."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if algorithm == "value":
        torch.nn.utils.clip_grad_value_(parameters, value)
    else:
        torch.nn.utils.clip_grad_norm_(parameters, value)


@contextmanager
def state_of(view: View, state: str) -> Iterator[None]:
    """What the trainer does within: "training", "ending" a step, or "validating"."""
    before, view.state = view.state, state
    try:
        yield
    finally:
        view.state = before
