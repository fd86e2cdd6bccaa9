"""`Trainer`: transformers' own, whose training is a run of this package."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import time
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase, ProcessorMixin, TrainingArguments, set_seed
from transformers import Trainer as TransformersTrainer
from transformers.trainer_callback import TrainerControl, TrainerState
from transformers.trainer_utils import IntervalStrategy, TrainOutput, align_special_tokens

import elastic_train as et
from elastic_train.errors import ConfigError
from elastic_train.integrations.hf.arguments import check_arguments
from elastic_train.integrations.hf.described import Described, described
from elastic_train.integrations.hf.given_model import give_values
from elastic_train.integrations.hf.overridden import check_callbacks, check_overridden
from elastic_train.integrations.hf.progress import Progress
from elastic_train.integrations.hf.saved import STATE, save_checkpoint
from elastic_train.train.model.optimizer import names_of

if TYPE_CHECKING:
    from ray.train import RunConfig, ScalingConfig

log = logging.getLogger(__name__)


class Trainer(TransformersTrainer):
    """Takes what transformers.Trainer takes, and trains on as many workers as there are.

    `devices` is how many devices the script was written for: a batch has `per_device_train_batch_size *
    gradient_accumulation_steps * devices` samples. It is part of the training problem; how many workers share
    a batch is said by Ray Train's `scaling_config`, by default from one to as many as there are
    micro-batches. Storage and names are those of `run_config`, by default below `output_dir`. Other options
    of ElasticTrainer, such as `machines` or `parallelism`, are taken by their names.

    ConfigError names an argument, a field of TrainingArguments or an overridden method that has no meaning
    here.
    """

    def __init__(
        self,
        *given: Any,
        devices: int = 1,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        **named: Any,
    ) -> None:
        known = inspect.signature(TransformersTrainer.__init__).parameters
        own = {name: value for name, value in named.items() if name in known}
        options = {name: value for name, value in named.items() if name not in known}
        self._check_options(options, devices)
        args = own.get("args", given[1] if len(given) > 1 else None)
        if args is not None and not isinstance(args, TrainingArguments):
            raise ConfigError(
                field="Trainer(args=...)", problem=f"must be TrainingArguments, got {type(args).__name__}."
            )
        if args is not None:
            check_arguments(args)
        check_overridden(
            type(self), TransformersTrainer, Trainer, evaluates=args is not None and _evaluates(args)
        )
        self.elastic = {
            "devices": devices,
            "scaling_config": scaling_config,
            "run_config": run_config,
            **options,
        }
        super().__init__(*given, **own)
        self._trained = False
        check_callbacks(self.callback_handler.callbacks, evaluates=_evaluates(self.args))

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train to the last step, through whatever happens to the machines.

        The same script, started again, goes on where its run was; `resume_from_checkpoint` names a checkpoint
        of transformers' that a new run begins with. Afterwards `model` has the trained weights, the best ones
        with `load_best_model_at_end`. A run that was stopped by a signal ends the script.
        """
        for name, value in (("trial", trial), ("ignore_keys_for_eval", ignore_keys_for_eval)):
            if value is not None:
                raise ConfigError(field=f"train({name}=...)", problem="is not supported.")
        if self._trained:
            raise ConfigError(
                field="Trainer.train",
                problem="was called before, and its run is over.",
                remedy="Make another Trainer, with an output_dir of its own.",
            )
        check_callbacks(self.callback_handler.callbacks, evaluates=_evaluates(self.args))
        begins = self._beginning(resume_from_checkpoint)
        self._trained, self.is_in_train = True, True
        started = time.monotonic()
        self._prepare_model()
        if begins is not None:
            begins = dataclasses.replace(begins, names=self._names_of_optimizer())
        plan = described(self)
        self._begin_state(plan, begins)
        self.control = self.callback_handler.on_train_begin(self.args, self.state, self.control)
        if self.args.eval_on_start:
            self.evaluate()
        progress = Progress(
            self,
            plan.steps,
            accumulated=plan.batch.micro_batches,
            measured=plan.measured,
            save=lambda step, path, again: save_checkpoint(self, f"{plan.url}/{path}", step, again=again),
            stop=plan.ask_to_stop,
        )
        progress.caught_up(plan.past())
        self.model.to("cpu")
        result = plan.trainer(progress, begins).fit(quiet=bool(self.args.disable_tqdm))
        if result.outcome == "stopped" and not progress.stopping:
            raise SystemExit(
                f"the run was stopped after step {self.state.global_step}; started again, it goes on"
            )
        return self._finish(plan, progress, started)

    # -- private -------------------------------------------------------------------------------------------

    @staticmethod
    def _check_options(options: Mapping[str, Any], devices: int) -> None:
        taken = inspect.signature(et.ElasticTrainer.__init__).parameters
        from_args = {
            "task",
            "batch",
            "max_steps",
            "max_epochs",
            "clip_norm",
            "precision",
            "checkpoints",
            "resume_from",
        }
        for name in options:
            if name not in taken or name in from_args or name in ("self", "others"):
                raise ConfigError(
                    field=f"Trainer({name}=...)",
                    problem="is an argument of neither transformers.Trainer nor a run."
                    if name not in taken
                    else "follows from TrainingArguments.",
                )
        if not isinstance(devices, int) or isinstance(devices, bool) or devices < 1:
            raise ConfigError(field="Trainer(devices=...)", problem=f"must be 1 or more, got {devices!r}.")

    def _beginning(self, given: str | bool | None) -> et.ResumeFrom | None:
        if isinstance(given, bool) or given is None:
            return None  # its own run is gone on with in any case
        if not (Path(given) / STATE).is_file():
            raise ConfigError(
                field="train(resume_from_checkpoint=...)",
                problem=f"{given} is no checkpoint of transformers.",
            )
        return et.ResumeFrom(url=str(given))

    def _names_of_optimizer(self) -> tuple[str, ...]:
        """The parameters in the optimizer's order, in which transformers keeps its state."""
        given = self.optimizer
        made: Any = given if given is not None else self.create_optimizer()
        self.optimizer = given
        return tuple(chain.from_iterable(names_of(made, dict(self.model.named_parameters()))))

    def _prepare_model(self) -> None:
        """What transformers does to a model before it trains."""
        args = self.args
        if self.train_dataset is None:
            raise ConfigError(field="Trainer(train_dataset=...)", problem="is needed to train.")
        if self.model_init is not None:
            set_seed(args.seed)
            self.model = self.model_wrapped = self.call_model_init()
            self.optimizer = self.lr_scheduler = None
        tokenizes = isinstance(self.processing_class, PreTrainedTokenizerBase | ProcessorMixin)
        if tokenizes and hasattr(self.model, "config"):
            align_special_tokens(self.model, self.processing_class)
        if args.activation_checkpointing:
            given: Any = args.activation_checkpointing_kwargs or {}
            settings: dict[str, Any] = dict(given)
            every, offload = settings.pop("every_n_layers", 1), settings.pop("offload", False)
            model: Any = self.model
            model.activation_checkpointing_enable(
                activation_checkpointing_kwargs=settings or None, every_n_layers=every, offload=offload
            )

    def _begin_state(self, plan: Described, begins: et.ResumeFrom | None) -> None:
        self.state = TrainerState(stateful_callbacks=[])
        if begins is not None:
            said = TrainerState.load_from_json(str(Path(begins.url) / STATE))
            for name in (
                "global_step",
                "epoch",
                "log_history",
                "best_metric",
                "best_global_step",
                "total_flos",
            ):
                setattr(self.state, name, getattr(said, name))
            self.state.best_model_checkpoint = said.best_model_checkpoint
        self._began = self.state.global_step
        self.state.train_batch_size = self.args.per_device_train_batch_size
        self.state.compute_steps(self.args, plan.max_steps)
        self.state.max_steps, self.state.num_train_epochs = plan.max_steps, plan.epochs
        self.state.is_local_process_zero = self.state.is_world_process_zero = True
        self.control = TrainerControl()

    def _finish(self, plan: Described, progress: Progress, started: float) -> TrainOutput:
        progress.caught_up(plan.past())
        progress.finished()
        progress.checkpoints(plan.kept())
        for step in progress.missing:
            log.warning(
                "checkpoint-%d was not written, as where a worker dies while it hands its state over", step
            )
        state, args = self.state, self.args
        self.control.should_training_stop = False
        give_values(self.model, plan.url)
        steps, seconds = state.global_step - self._began, time.monotonic() - started
        loss = progress.rest() / max(steps, 0.001)
        epochs = plan.steps.length * args.num_train_epochs
        samples = epochs if args.max_steps <= 0 else state.max_steps * plan.batch.global_size
        share = steps / max(state.max_steps, 1)
        metrics: dict[str, Any] = {
            "train_runtime": round(seconds, 4),
            "train_samples_per_second": round(samples * share / seconds, 3),
            "train_steps_per_second": round(steps / seconds, 3),
            "total_flos": state.total_flos,
            "train_loss": loss,
        }
        self.log(metrics)
        if args.load_best_model_at_end and state.best_global_step:
            if Path(state.best_model_checkpoint or "").name != f"checkpoint-{state.best_global_step}":
                log.warning("the best step was %d, whose checkpoint was not written", state.best_global_step)
            if state.best_model_checkpoint is not None:
                self._load_best_model()
        if self.place_model_on_device:
            self._move_model_to_device(self.model, args.device)
        self.control = self.callback_handler.on_train_end(args, state, self.control)
        self.is_in_train = False
        self.model.eval()
        return TrainOutput(state.global_step, loss, metrics)


def _evaluates(args: TrainingArguments) -> bool:
    return args.eval_strategy != IntervalStrategy.NO
