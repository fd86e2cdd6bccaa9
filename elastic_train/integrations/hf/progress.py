"""What a run does, told to a trainer's state and callbacks in the order of transformers' own loop."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ray.train import UserCallback
from transformers import EarlyStoppingCallback
from transformers.trainer_callback import DefaultFlowCallback, TrainerControl
from transformers.trainer_utils import SaveStrategy

from elastic_train.control.events import CheckpointCommitted, StepCommitted
from elastic_train.integrations.hf.loss_kind import Steps
from elastic_train.observe.journal_records import Record

log = logging.getLogger(__name__)

NOT_ASKED = {
    "should_save": "checkpoints are saved as save_strategy and save_steps say",
    "should_evaluate": "a run evaluates as eval_strategy and eval_steps say",
    "should_epoch_stop": "an epoch has all of its steps",
}
"""What a callback may set, and nobody does: why."""


class Progress(UserCallback):
    """Hears of each step, evaluation and checkpoint, once each; what is run again after a loss is the
    same."""

    def __init__(
        self,
        trainer: Any,
        steps: Steps,
        *,
        accumulated: int,
        measured: Sequence[str],
        save: Callable[[int, str, bool], None],
        stop: Callable[[], None],
    ) -> None:
        """`accumulated` are the micro-batches of an accumulated batch; `measured` begin the names of what an
        evaluation measures of each data set. `save(step, path, again)` writes a checkpoint in transformers'
        way, unless it was `again` there; `stop` asks the run to end."""
        self._trainer, self._steps, self._accumulated = trainer, steps, accumulated
        self._measured, self._save, self._stop = tuple(measured), save, stop
        self._losses: list[float] = []  # since the last log
        self.total_loss = 0.0
        self._grad_norm = self._rate = math.nan
        self._evaluated = 0  # the last step that was
        self._due: dict[int, float] = {}  # steps whose checkpoint is to be saved, with their epoch
        self._silent = False
        self._said: set[str] = set()  # of what callbacks asked for in vain
        self.stopping = False

    def caught_up(self, records: Iterable[Record]) -> None:
        """What was there before this driver: the state goes on from it, and no callback hears of it again."""
        self._silent = True
        self.after_records(tuple(records))
        self._silent = False

    def after_records(self, records: Sequence[Record]) -> None:
        for record in records:
            event = record.event
            if isinstance(event, StepCommitted):
                if event.step == self._trainer.state.global_step + 1:
                    self._step(event)
                self._evaluation(event)
            elif isinstance(event, CheckpointCommitted):
                self._checkpoint(event.stored.step, event.stored.path)

    def checkpoints(self, kept: Iterable[tuple[int, str]]) -> None:
        """Save what is there by step and path, and nobody told of."""
        for step, path in kept:
            self._checkpoint(step, path)

    @property
    def missing(self) -> list[int]:
        """Steps whose checkpoint was due and is not there."""
        return sorted(self._due)

    def finished(self) -> None:
        """The epoch in which a run is stopped ends with it."""
        if self._trainer.state.global_step and not self._ends_epoch:
            self._epoch_ends()

    # -- private -------------------------------------------------------------------------------------------

    def _step(self, event: StepCommitted) -> None:
        state = self._trainer.state
        if (event.step - 1) % self._steps.per_epoch == 0:
            self._call("on_epoch_begin")
        self._call("on_step_begin")
        self._losses.append(event.loss)
        self._grad_norm, self._rate = event.grad_norm, event.rates[0] if event.rates else math.nan
        state.global_step = event.step
        state.epoch = self._steps.epoch(event.step, self._accumulated)
        self._call("on_step_end")
        self._only_what_is_due("on_step_end")
        self._log()
        if self._trainer.control.should_save:
            self._owe(event.step)
        if self._ends_epoch:
            self._epoch_ends()
        self._heed()

    @property
    def _ends_epoch(self) -> bool:
        """Whether the last step was an epoch's last one, or the run's."""
        state = self._trainer.state
        return state.global_step % self._steps.per_epoch == 0 or state.global_step >= state.max_steps

    def _epoch_ends(self) -> None:
        self._call("on_epoch_end")
        self._only_what_is_due("on_step_end", "on_epoch_end")
        self._log()
        if self._trainer.control.should_save:
            self._owe(self._trainer.state.global_step)

    def _only_what_is_due(self, *events: str) -> None:
        """Take back what a callback asked for besides what these events ask for, with a word."""
        trainer, due = self._trainer, TrainerControl()
        for event in events:
            getattr(DefaultFlowCallback(), event)(trainer.args, trainer.state, due)
        for flag, why in NOT_ASKED.items():
            if flag == "should_evaluate" and not events:
                continue  # what was due is being told of
            if getattr(trainer.control, flag) and not getattr(due, flag):
                setattr(trainer.control, flag, False)
                if flag not in self._said:
                    step = trainer.state.global_step
                    log.warning("a callback set control.%s at step %d, in vain: %s", flag, step, why)
                self._said.add(flag)

    def _owe(self, step: int) -> None:
        self._due[step] = self._trainer.state.epoch
        self._trainer.control.should_save = False

    def _log(self) -> None:
        trainer = self._trainer
        if not trainer.control.should_log or not self._losses:
            return
        total = math.fsum(self._losses)
        self.total_loss += total
        logs = {
            "loss": total / len(self._losses),
            "grad_norm": self._grad_norm,
            "learning_rate": self._rate,
        }
        self._losses = []
        self._tell_log(logs)

    def rest(self) -> float:
        """The sum of all losses, of those too that were not logged."""
        return self.total_loss + math.fsum(self._losses)

    def _tell_log(self, logs: dict[str, float]) -> None:
        trainer = self._trainer
        if self._silent:
            entry = {**logs, "epoch": trainer.state.epoch, "step": trainer.state.global_step}
            trainer.state.log_history.append(entry)
        else:
            self._isolated("on_log", lambda: trainer.log(logs))
        trainer.control.should_log = False

    def _evaluation(self, event: StepCommitted) -> None:
        trainer = self._trainer
        found = {name: value for name, value in event.metrics if name.startswith(self._measured)}
        if not found or event.step <= self._evaluated or event.step != trainer.state.global_step:
            return
        self._evaluated = event.step
        for prefix in self._measured:
            own = {name: value for name, value in found.items() if name.startswith(prefix)}
            self._tell_log(own)
            self._call("on_evaluate", metrics=own)
            self._only_what_is_due()
        trainer.control.should_evaluate = False
        better = trainer._determine_best_metric(metrics=found, trial=None)
        if better and trainer.args.save_strategy == SaveStrategy.BEST:
            self._owe(event.step)
        self._heed()

    def _checkpoint(self, step: int, path: str) -> None:
        trainer = self._trainer
        epoch = self._due.get(step)
        if epoch is None:
            return
        state, now = trainer.state, (trainer.state.global_step, trainer.state.epoch)
        state.global_step, state.epoch = step, epoch
        try:
            self._save(step, path, self._silent)
        except Exception as error:  # noqa: BLE001 - it is tried again at the run's end
            log.warning("checkpoint-%d could not be written: %r", step, error)
        else:
            del self._due[step]
            self._call("on_save")
        finally:
            state.global_step, state.epoch = now

    def _heed(self) -> None:
        """What a callback asks for. The run's own end, and its patience, are the engine's."""
        control, state = self._trainer.control, self._trainer.state
        if (
            self._silent
            or not control.should_training_stop
            or self.stopping
            or state.global_step >= state.max_steps
        ):
            return
        own = any(
            isinstance(c, EarlyStoppingCallback)
            and c.early_stopping_patience_counter >= c.early_stopping_patience
            for c in self._trainer.callback_handler.callbacks
        )
        self.stopping = True
        if not own:
            log.info("a callback ends the run after step %d", state.global_step)
            self._stop()

    def _call(self, event: str, **more: Any) -> None:
        trainer, handler = self._trainer, self._trainer.callback_handler
        if not self._silent:
            hears = getattr(handler, event)
            self._isolated(event, lambda: hears(trainer.args, trainer.state, trainer.control, **more))
            return
        flow = [
            c
            for c in handler.callbacks
            if type(c).__name__ in ("DefaultFlowCallback", "EarlyStoppingCallback")
        ]
        for callback in flow:
            told = getattr(callback, event)(trainer.args, trainer.state, trainer.control, **more)
            trainer.control = told if told is not None else trainer.control

    def _isolated(self, event: str, tell: Callable[[], Any]) -> None:
        """What a person's callback raises costs that event alone: the steps after it are told of."""
        try:
            told = tell()
        except Exception as error:  # noqa: BLE001 - a person's code, which never ends a run
            log.warning("%s of a callback failed: %r", event, error)
        else:
            if told is not None:
                self._trainer.control = told
