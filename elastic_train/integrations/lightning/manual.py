"""Manual optimization: `training_step` updates optimizers itself, for all micro-batches of a step at once.

Each micro-batch's `training_step` runs in a thread of its own, one at a time, and stands still where it
updates an optimizer. When all stand there, their gradients are summed over the workers, the optimizer is
updated, and each goes on, in its turn. Their graphs are all in memory meanwhile.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from elastic_train.errors import ConfigError
from elastic_train.integrations.lightning.attached import View, clip
from elastic_train.integrations.lightning.hooks import transferred
from elastic_train.integrations.lightning.logged import Logged, logging_into, samples_of
from elastic_train.integrations.lightning.steps import arguments_of

DONE = 0


class _Dropped(BaseException):
    """The step was broken off: a training_step that stands still is left."""


class ManualOptimizer:
    """An optimizer as a training_step sees it."""

    def __init__(self, steps: ManualSteps, number: int, optimizer: torch.optim.Optimizer) -> None:
        self._steps, self._number, self.optimizer = steps, number, optimizer

    def step(self, closure: Any = None, **others: Any) -> None:
        if closure is not None:
            raise ConfigError(
                field="optimizer.step(closure)",
                problem="the update is made once, when all micro-batches computed their gradients.",
                remedy="Call manual_backward, and step() without a closure.",
            )
        self._steps.now.update(self._number)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._steps.now.zero(self._number)

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        module = self._steps.module
        module.toggle_optimizer(self)
        try:
            yield
        finally:
            module.untoggle_optimizer(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


class ManualScheduler:
    """A scheduler as a training_step sees it: stepped when the step is committed."""

    def __init__(self, steps: ManualSteps, number: int, scheduler: Any) -> None:
        self._steps, self._number, self.scheduler = steps, number, scheduler

    def step(self, *metrics: Any) -> None:
        if metrics:
            raise ConfigError(
                field="scheduler.step(metric)",
                problem="in training_step it is a metric of some samples.",
                remedy="Step it in on_train_epoch_end, by self.trainer.callback_metrics.",
            )
        self._steps.now.scheduled[self._number] += 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scheduler, name)


class MicroBatchThread:
    """The training_step of one micro-batch. `stands` is the optimizer that it updates, from 1 on."""

    def __init__(self, steps: ManualSteps, batch: Any, batch_idx: int) -> None:
        self._steps = steps
        self._go, self._stopped = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self.stands, self.dropped = DONE, False
        self.scheduled = [0] * len(steps.view.schedules)
        self.logged = Logged(on_step=True, on_epoch=False, weight=samples_of(batch))
        self.samples = samples_of(batch)
        self._batch, self._batch_idx = batch, batch_idx
        self._drawn: Any = None  # the state of the generators, where it stands
        self._trained: dict[Any, bool] = {}  # what it froze and unfroze, while it stands still
        self._toggled: dict[Any, bool] = {}
        self._backward: Callable[..., None] | None = None
        self._graded = False  # whether it has gradients that no update took
        self._stale: set[int] = set()  # optimizers whose old gradients Lightning would still have
        self._thread = threading.Thread(target=self._run, daemon=True)

    def turn(self, backward: Callable[..., None]) -> None:
        """Run it up to its next update, or to its end."""
        self._backward, self._steps.now = backward, self
        parameters = self._steps.parameters
        before = {parameter: parameter.requires_grad for parameter in parameters}
        for parameter, trained in self._trained.items():
            parameter.requires_grad_(trained)
        if self._drawn is not None:  # it goes on drawing where it stood
            set_drawn(self._drawn)
        self._stopped.clear()
        if self._thread.ident is None:
            self._thread.start()
        self._go.set()
        self._stopped.wait()
        self._drawn = drawn()
        now = {p: p.requires_grad for p in parameters if p.requires_grad != before[p]}
        self._trained = now if self.stands != DONE else {}
        for parameter in now if self.stands != DONE else ():
            parameter.requires_grad_(before[parameter])
        if self._error is not None:
            raise self._error

    def drop(self) -> None:
        """End it where it stands."""
        if self._thread.is_alive():
            self.dropped = True
            self._go.set()
            self._thread.join()

    # -- in its thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        steps = self._steps
        try:
            self._wait()
            with steps.as_caller(), logging_into(self.logged):
                batch = steps.transferred(self._batch)
                step = steps.module.training_step
                step(*arguments_of(step, batch, self._batch_idx, 0, 1))
            if self._graded:
                raise ConfigError(
                    field="training_step",
                    problem="computes gradients that it does not use in an update: they would be lost.",
                    remedy="Step the optimizer in each training_step; a larger batch_size accumulates.",
                )
        except _Dropped:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again where the loop waits
            self._error = error
        finally:
            self.stands = DONE
            self._stopped.set()

    def _wait(self) -> None:
        self._go.wait()
        self._go.clear()
        if self.dropped:
            raise _Dropped

    def backward(self, loss: torch.Tensor, **said: Any) -> None:
        assert self._backward is not None
        self._backward(loss, **said)
        self._graded = True

    def toggle(self, optimizer: Any) -> None:
        """Train this optimizer's parameters alone. The flags before are the micro-batch's own."""
        parameters = self._steps.parameters
        self._toggled = {parameter: parameter.requires_grad for parameter in parameters}
        own = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        for parameter in parameters:
            parameter.requires_grad_(self._toggled[parameter] and parameter in own)

    def untoggle(self) -> None:
        for parameter, trained in self._toggled.items():
            parameter.requires_grad_(trained)
        self._toggled = {}

    def zero(self, number: int) -> None:
        self._stale.discard(number)
        for parameter in self._steps.of(number):
            parameter.grad = None

    def update(self, number: int) -> None:
        """Stand still until the optimizer was updated."""
        if number in self._stale:
            raise ConfigError(
                field="optimizer.step",
                problem="its gradients of an earlier backward are dropped by now, and it was not told "
                "zero_grad() since.",
                remedy="Call zero_grad() before each manual_backward, or toggle_optimizer.",
            )
        self._stale |= {
            other
            for other in range(1, len(self._steps.view.optimizers) + 1)
            if other != number and any(p.grad is not None for p in self._steps.of(other))
        }
        self.stands, self._graded = number, False
        self._stopped.set()
        self._wait()
        self.stands = DONE


class ManualSteps:
    """The training_steps of a step's micro-batches on this rank."""

    def __init__(self, module: Any, view: View) -> None:
        self.module, self.view = module, view
        self._real = list(view.optimizers)
        view.optimizers = [
            ManualOptimizer(self, number, each) for number, each in enumerate(self._real, start=1)
        ]
        view.manual_schedulers = [
            ManualScheduler(self, number, each.scheduler) for number, each in enumerate(view.schedules)
        ]
        self.parameters = [p for each in self._real for group in each.param_groups for p in group["params"]]
        self.now: Any = None  # the micro-batch that runs
        self._clips: dict[int, tuple[float, str]] = {}
        self._scheduled: list[int] = []
        self._precision = (False, torch.float32)  # whether, and in what, a micro-batch is autocast
        for number, each in enumerate(self._real, start=1):
            each.register_step_pre_hook(lambda stepped, *_, own=number: self._clip(own, stepped))

    def of(self, number: int) -> list[Any]:
        """The parameters of an optimizer."""
        return [p for group in self._real[number - 1].param_groups for p in group["params"]]

    def run(
        self,
        step: Any,
        batch: Any,
        batch_idx: Callable[[], int],
        measure: Callable[[Any, Logged, float], None],
    ) -> None:
        """All passes over the micro-batches: one up to each update, and one to the end."""
        threads: list[MicroBatchThread] = []
        self.view.manual, updates = self, 0
        kind = self.view.context.device.type
        try:
            while True:
                for at, micro in enumerate(batch):
                    self._precision = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
                    if at == len(threads):
                        threads.append(MicroBatchThread(self, micro, batch_idx()))
                    threads[at].turn(lambda loss, **said: step.backward(loss, **said))
                    if threads[at].stands == DONE:
                        measure(step, threads[at].logged, threads[at].samples)
                where = {thread.stands for thread in threads}
                if len(where) > 1:
                    raise _unlike()
                number = step.agree(where.pop() if where else None)
                if number == DONE:
                    break
                updates += 1
                step.update(self._real[number - 1])
                self._clips.clear()
        finally:
            self.view.manual = self.now = None
            for thread in threads:
                thread.drop()
        if not updates:
            raise ConfigError(
                field="training_step", problem="updates no optimizer.", remedy="Call optimizer.step()."
            )
        if len({tuple(thread.scheduled) for thread in threads}) > 1:
            raise _unlike()
        own = threads[0].scheduled if threads else [None] * len(self.view.schedules)
        self._scheduled = [step.agree(count) for count in own]

    def step_schedulers(self) -> None:
        """As often as the training_step did."""
        for each, count in zip(self.view.schedules, self._scheduled, strict=True):
            for _ in range(count):
                each.scheduler.step()

    def backward(self, loss: torch.Tensor, *args: Any, **said: Any) -> None:
        """`manual_backward`."""
        unknown = sorted(said.keys() - {"retain_graph"})
        if args or unknown:
            raise ConfigError(
                field="self.manual_backward",
                problem=f"it takes a loss and retain_graph, and not {', '.join(unknown) or 'more'}.",
            )
        self.module.on_before_backward(loss)
        self.now.backward(loss, **said)

    def clip(self, optimizer: Any, value: float | None, algorithm: str) -> None:
        """`clip_gradients`, of the update that comes next."""
        if value:
            self._clips[optimizer._number] = value, algorithm

    def _clip(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        if number in self._clips:
            clip(optimizer, *self._clips[number])

    def transferred(self, batch: Any) -> Any:
        return transferred(self.module, batch)

    @contextmanager
    def as_caller(self) -> Iterator[None]:
        """In the precision of the thread of the loop."""
        kind, (enabled, dtype) = self.view.context.device.type, self._precision
        with torch.autocast(kind, dtype=dtype, enabled=enabled):
            yield


def drawn() -> Any:
    """The state of the global generators of the host."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def set_drawn(state: Any) -> None:
    python, numpy, host = state
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(host)


def _unlike() -> ConfigError:
    return ConfigError(
        field="training_step",
        problem="micro-batches of a step update other optimizers, or as often other schedulers.",
        remedy="Decide by batch_idx, global_step or current_epoch, and not by the samples.",
    )
