"""A fit as a loop: which of a LightningModule's hooks is called when.

What follows a step in Lightning, an evaluation, the end of an epoch, stands before the next step here: it is
done anew where that step is broken off, from the state that the last one left.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from elastic_train.errors import ConfigError
from elastic_train.integrations.lightning.attached import Settings, View, attach, clip, state_of
from elastic_train.integrations.lightning.data import Source
from elastic_train.integrations.lightning.hooks import overridden
from elastic_train.integrations.lightning.logged import Logged, logging_into, samples_of
from elastic_train.integrations.lightning.manual import ManualSteps
from elastic_train.integrations.lightning.optimizers import Configured, configured
from elastic_train.integrations.lightning.progress import Progress, Stopping, reported
from elastic_train.integrations.lightning.steps import Steps, loss_of, sizes_of

MODEL = "lightning"
PREFIX = f"{MODEL}."
"""Of the names of a module's tensors in the run. `module`, as wrappers name what they hold, is left out."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Began:
    """With what a run begins that goes on from a file: its step, and the state of its schedulers."""

    step: int
    schedulers: list[dict[str, Any]]


class Fit:
    """The loop. It goes to the workers with the module, or with the function that makes it."""

    def __init__(
        self,
        made: Callable[[], Any],
        source: Source,
        settings: Settings,
        stopping: tuple[Stopping, ...],
        began: Began | None = None,
    ) -> None:
        self.began = began
        self.made, self.source, self.settings, self.stopping = made, source, settings, stopping
        self._builds: weakref.WeakKeyDictionary[Steps, Configured] = weakref.WeakKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_builds"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._builds = weakref.WeakKeyDictionary()

    def __call__(self, ctx: Any) -> None:
        steps = ctx.model(MODEL, self._build)
        run = Entered(self, ctx, steps, self._configured(steps))
        for batch in ctx.batches(self.source.training, collate=self.source.collate):
            if run.before(batch):
                break
            with ctx.step(metrics=None) as step:
                run.compute(step, batch)
            run.after(step, batch)
        run.end()

    def _build(self) -> Steps:
        module = self.made()
        attach(module, View(self.settings, module, self.source.datamodule))
        if overridden(module, "setup") or overridden(module, "prepare_data"):
            self.source.loaders()  # data are prepared, and a data module is set up, before the module
        if overridden(module, "setup"):
            module.setup("fit")
        if overridden(module, "configure_model"):
            module.configure_model()
        return Steps(module)

    def _configured(self, steps: Steps) -> Configured:
        """The optimizers of one build of the module, made once."""
        found = self._builds.get(steps)
        if found is None:
            module: Any = steps.module
            found = configured(module.configure_optimizers(), automatic=module.automatic_optimization)
            view = module._trainer
            for optimizer in found.optimizers:
                _before_each_update(optimizer, module, view)
            self._builds[steps] = found
        found.rewind()
        return found


def _before_each_update(optimizer: torch.optim.Optimizer, module: Any, view: View) -> None:
    """Hooks that see the gradient of the mean over the global batch."""
    settings = view.settings
    watches = overridden(module, "on_before_optimizer_step")
    clips = overridden(module, "configure_gradient_clipping")
    by_value = settings.clip is not None and settings.clip_algorithm == "value"
    if not (watches or clips or by_value):
        return

    def hook(stepped: torch.optim.Optimizer, *_: Any) -> None:
        if view.context is None:
            return
        with logging_into(view.hooked):
            if watches:
                module.on_before_optimizer_step(stepped)
            if clips and module.automatic_optimization:
                module.configure_gradient_clipping(stepped, settings.clip, settings.clip_algorithm)
            elif by_value:
                assert settings.clip is not None
                clip(stepped, settings.clip, "value")

    optimizer.register_step_pre_hook(hook)


class Entered:
    """One entry of the loop."""

    def __init__(self, fit: Fit, ctx: Any, steps: Any, made: Configured) -> None:
        self._fit, self._ctx, self._steps = fit, ctx, steps
        self._settings, self._module = fit.settings, steps.module
        view = self._view = self._module._trainer
        view.schedules = made.schedules
        view.optimizers = [
            ctx.optimizer(f"optimizer_{number}", lambda _, made=each: made, steps)
            for number, each in enumerate(made.optimizers)
        ]
        for number, each in enumerate(made.schedules):
            ctx.register(f"scheduler_{number}", each.scheduler)
        self._progress = ctx.register("progress", Progress(stopping=fit.stopping))
        self._manual = None
        if not self._module.automatic_optimization:
            self._manual = ManualSteps(self._module, view)
        self._began = self._ended = False

    # -- between steps -------------------------------------------------------------------------------------

    def before(self, batch: Any) -> bool:
        """What follows the last step, and precedes the next. Whether training is over."""
        view, module = self._view, self._module
        view.context = self._ctx
        self._begin()
        if self._follow():
            return True
        first = (batch.step - 1) % self._settings.steps_per_epoch == 0
        view.hooked = Logged(on_step=True, on_epoch=False)
        with logging_into(view.hooked):
            if first:
                module.on_train_epoch_start()
            if module.on_train_batch_start(None, self._batch_idx(batch, 0)) == -1:
                raise ConfigError(
                    field="on_train_batch_start",
                    problem="returned -1: an epoch that is left early has samples that nobody used.",
                    remedy="Set self.trainer.should_stop to end training.",
                )
        return False

    def end(self) -> None:
        """Training is over: its last step is followed, once, and the hooks of the end called."""
        view, module = self._view, self._module
        view.context = self._ctx
        self._begin()
        if not self._ended:
            self._follow()
        with state_of(view, "ending"):
            module.on_train_end()
            module.on_fit_end()
            self._fit.source.teardown()
            if overridden(module, "teardown"):
                module.teardown("fit")

    def _begin(self) -> None:
        if not self._began:
            self._began = True
            began = self._fit.began
            if began is not None and began.step == self._ctx.at:
                for each, state in zip(self._view.schedules, began.schedulers, strict=False):
                    each.scheduler.load_state_dict(copy.deepcopy(state))
            self._progress_seen()
            self._module.on_fit_start()
            self._module.on_train_start()

    def _follow(self) -> bool:
        """An evaluation that is due, and the end of an epoch. Whether training is over."""
        done = self._ctx.at
        self._ended = True
        if done == 0:
            return False
        view, progress, settings = self._view, self._progress, self._settings
        epoch, within = (done - 1) // settings.steps_per_epoch, (done - 1) % settings.steps_per_epoch + 1
        last = within == settings.steps_per_epoch
        batches = settings.batches if last else within * settings.global_size // settings.loader_batch
        stops = False
        with state_of(view, "ending"):
            if self._validates(epoch, batches):
                self._validate()
                stops = progress.stops(epoch=False)
            self._step_schedules("step", batches, plateau=True)
            if last:
                self._keep(progress.means())
                with logging_into(Logged(on_step=False, on_epoch=True)) as found:
                    self._module.on_train_epoch_end()
                self._keep(reported(found.values, epoch=True))
                stops = progress.stops(epoch=True) or stops
                self._step_schedules("epoch", epoch + 1, plateau=True)
        return stops or view.should_stop

    def _keep(self, metrics: dict[str, float]) -> None:
        """Newest metrics, told and kept for whoever monitors one."""
        if metrics:
            self._progress.metrics.update(metrics)
            self._progress.metrics.update(
                {name.removesuffix("_epoch"): value for name, value in metrics.items()}
            )
            self._progress_seen()
            self._ctx.report(**metrics)

    def _progress_seen(self) -> None:
        self._view.callback_metrics = {
            name: torch.tensor(value) for name, value in self._progress.metrics.items()
        }

    def _step_schedules(self, interval: str, count: int, *, plateau: bool) -> None:
        if self._manual is not None:
            return
        for each in self._view.schedules:
            if not each.due(interval, count, plateau=plateau):
                continue
            metric = self._progress.metrics.get(each.monitor or "") if plateau else None
            if plateau and metric is None:
                if not each.strict:
                    continue
                raise ConfigError(
                    field=f"configure_optimizers: monitor={each.monitor!r}",
                    problem="nobody logs it.",
                    remedy=f"There is {', '.join(map(repr, sorted(self._progress.metrics)))}.",
                )
            self._module.lr_scheduler_step(each.scheduler, metric)

    # -- evaluations ---------------------------------------------------------------------------------------

    def _validates(self, epoch: int, batches: int) -> bool:
        settings = self._settings
        if not settings.validate_batches:
            return False
        if settings.validate_epochs and (epoch + 1) % settings.validate_epochs:
            return False
        counted = batches if settings.validate_epochs else epoch * settings.batches + batches
        return counted % settings.validate_batches == 0

    def _validate(self) -> None:
        module, held_out = self._module, self._fit.source.held_out()
        with state_of(self._view, "validating"), logging_into(Logged(on_step=False, on_epoch=True)) as found:
            module.on_validation_start()
            module.on_validation_epoch_start()
            for each in held_out:
                measured = self._ctx.evaluate(each, lambda micro: self._metrics(micro, len(held_out)))
                self._keep({name: value for name, value in measured.items() if name != "batches"})
            module.on_validation_epoch_end()
            module.on_validation_end()
        self._keep(reported(found.values, epoch=True))

    def _metrics(self, micro: Any, loaders: int) -> dict[str, tuple[float, float]]:
        number, before = micro["index"] // self._settings.micro_size, sizes_of(self._module)
        _, logged = self._steps("validation_step", micro["batch"], number, micro["loader"], loaders)
        for name, size in sizes_of(self._module).items():
            if size != before.get(name) and overridden(self._module, "on_validation_epoch_end"):
                raise ConfigError(
                    field="on_validation_epoch_end",
                    problem=f"validation_step keeps something in {name!r}, and which batches a worker "
                    "evaluates depends on the plan.",
                    remedy="Log values: they are put together over all workers.",
                )
        found = {"batches": (1.0, 1.0)}
        for name, each in logged.values.items():
            if each.on_epoch:
                whole = f"{name}_epoch" if each.on_step else name
                found[whole] = each.value * each.weight, each.weight
        return found

    # -- a step --------------------------------------------------------------------------------------------

    def compute(self, step: Any, batch: Any) -> None:
        """All micro-batches of this rank."""
        if self._manual is not None:
            self._manual.run(step, batch, lambda: self._batch_idx(batch, batch.index), self._measure)
            return
        for micro in batch:
            output, logged = self._steps("training_step", micro, self._batch_idx(batch, batch.index))
            self._measure(step, logged, samples_of(micro))
            loss = loss_of(output)
            self._module.on_before_backward(loss)
            step.backward(loss)

    def _measure(self, step: Any, logged: Logged, samples: float) -> None:
        """By name, which says what it is reported of; and what an epoch's mean is weighed by."""
        for name, each in logged.values.items():
            told = f"{int(each.on_step)}{int(each.on_epoch)}{name}"
            step.measure(**{told: (each.value * each.weight, each.weight)})
            if each.on_epoch:
                step.measure(**{f"weight{name}": (each.weight, samples)})

    def after(self, step: Any, batch: Any) -> None:
        """The step was committed."""
        view, settings = self._view, self._settings
        self._ended = False
        within = (batch.step - 1) % settings.steps_per_epoch + 1
        last = within == settings.steps_per_epoch
        samples = settings.last_size if last else settings.global_size
        told: dict[str, float] = {}
        for key, value in step.metrics.items():
            if key.startswith("weight"):
                continue
            on_step, on_epoch, name = key[0] == "1", key[1] == "1", key[2:]
            if on_step:
                told[f"{name}_step" if on_epoch else name] = value
            if on_epoch:
                weight = step.metrics[f"weight{name}"] * samples
                self._progress.add(f"{name}_epoch" if on_step else name, value, weight)
        with state_of(view, "ending"):
            if self._manual is not None:
                self._manual.step_schedulers()
            elif not step.skipped:
                batches = settings.batches if last else within * settings.global_size // settings.loader_batch
                self._step_schedules("step", batches, plateau=False)
                if last:
                    self._step_schedules("epoch", batch.epoch + 1, plateau=False)
            with logging_into(view.hooked):
                loss = {"loss": torch.tensor(step.loss)}
                self._module.on_train_batch_end(loss, None, self._batch_idx(batch, 0))
        told |= reported(view.hooked.values, epoch=False)
        for name, each in view.hooked.values.items():
            if each.on_epoch:
                self._progress.add(f"{name}_epoch" if each.on_step else name, each.value, samples)
        if told:
            self._progress.metrics.update(told)
            self._progress.metrics.update({n.removesuffix("_step"): v for n, v in told.items()})
            self._progress_seen()
            self._ctx.report(**told)

    def _batch_idx(self, batch: Any, index: int) -> int:
        """The data loader's batch in which a micro-batch begins."""
        settings = self._settings
        before = (batch.step - 1) % settings.steps_per_epoch * settings.global_size
        return (before + index * settings.micro_size) // settings.loader_batch


class Copies:
    """Of a module that is there already."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(self) -> Any:
        return copy.deepcopy(self.module)
