"""What of a trainer goes to the workers: its methods and attributes, without models, data and connections."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import Trainer as TransformersTrainer

STAYS = frozenset(
    {
        *(
            "model",
            "model_wrapped",
            "model_init",
            "train_dataset",
            "eval_dataset",
            "accelerator",
            "deepspeed",
        ),
        *("gather_function", "callback_handler", "state", "control", "optimizer", "lr_scheduler"),
        *("_memory_tracker", "_eval_dataloaders", "elastic", "compute_metrics"),
        *("preprocess_logits_for_metrics", "data_collator", "processing_class"),
    }
)
"""Attributes that the driver keeps, or that a task has by itself."""


class Alone:
    """What a loss of a trainer asks of an accelerator, of one process."""

    num_processes, process_index = 1, 0
    parallelism_config = None

    def unwrap_model(self, model: Any, **_: Any) -> Any:
        return model.held if isinstance(model, StandIn) else model


class StandIn:
    """Is called in a model's place; everything else of it is the model's."""

    def __init__(self, model: Any) -> None:
        self.held = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.held, name)


class Asked(BaseException):
    """What a model was called with. No code of a script catches it."""

    def __init__(self, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.positional, self.named = args, named


class Asks(StandIn):
    """Catches what the model is called with."""

    def __call__(self, *args: Any, **named: Any) -> Any:
        raise Asked(args, named)


class Answers(StandIn):
    """Returns what the model gave."""

    def __init__(self, model: Any, output: Any) -> None:
        super().__init__(model)
        self._output, self.calls = _apart(output), 0

    def __call__(self, *args: Any, **named: Any) -> Any:
        self.calls += 1
        return self._output


def _apart(output: Any) -> Any:
    """The output with a loss of its own: transformers multiplies it in place."""
    loss = (
        output.get("loss")
        if isinstance(output, Mapping)
        else output[0]
        if isinstance(output, tuple)
        else None
    )
    if not isinstance(loss, torch.Tensor):
        return output
    if isinstance(output, tuple):
        return loss.clone(), *output[1:]
    own = copy.copy(output)
    own["loss"] = loss.clone()  # type: ignore[index]
    return own


class Named:
    """The parameters of a model by their names, in its place where an optimizer is made."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        self._named = list(named)

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(self._named)

    def parameters(self, *_: Any, **__: Any) -> Iterator[nn.Parameter]:
        return (parameter for _, parameter in self._named)


class Carried:
    """A trainer in a worker. `decayed` are the names of the parameters that its weight decay is for."""

    def __init__(self, trainer: Any, *, decayed: Iterable[str]) -> None:
        self._kind = type(trainer)
        self._state = {name: value for name, value in vars(trainer).items() if name not in STAYS}
        self._decayed = frozenset(decayed)
        self._made: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_made": None}

    @property
    def trainer(self) -> Any:
        """The trainer, made when it is first asked for."""
        if self._made is None:
            made = object.__new__(self._kind)
            made.__dict__.update(self._state)
            made.__dict__.update(model=None, model_wrapped=None, optimizer=None, lr_scheduler=None)
            made.__dict__.update(accelerator=Alone(), is_in_train=True)
            made.__dict__["get_decay_parameter_names"] = lambda model=None: sorted(self._decayed)
            self._made = made
        return self._made

    def built(self, model: nn.Module) -> None:
        """`trainer.model` is the model that was built last."""
        self.trainer.model = self.trainer.model_wrapped = model

    def asked(self, batch: Mapping[str, Any], items: Any) -> Asked | None:
        """What `compute_loss` calls the model with; None where it calls none."""
        trainer = self.trainer
        try:
            trainer.compute_loss(Asks(trainer.model), dict(batch), num_items_in_batch=items)
        except Asked as asked:
            return asked
        return None

    def loss(self, output: Any, batch: Mapping[str, Any], items: Any) -> tuple[torch.Tensor, int]:
        """What `compute_loss` makes of the model's output, and how often it called the model for it."""
        trainer = self.trainer
        answers = Answers(trainer.model, output)
        loss = trainer.compute_loss(answers, dict(batch), num_items_in_batch=items)
        return loss, answers.calls

    def items(self, batch: Mapping[str, Any]) -> torch.Tensor | None:
        """How many labels of a micro-batch count, where transformers counts them."""
        device = next((v.device for v in batch.values() if isinstance(v, torch.Tensor)), torch.device("cpu"))
        counted: Any = TransformersTrainer._get_num_items_in_batch(self.trainer, [dict(batch)], device)
        return counted

    def optimizer(self, named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        trainer = self.trainer
        trainer.optimizer = None
        trainer.model, held = Named(named), trainer.model
        try:
            made: Any = trainer.create_optimizer()
            set_alone: Any = trainer.optimizer  # a method of the script may return nothing
            return set_alone if made is None else made
        finally:
            trainer.model, trainer.optimizer = held, None

    def schedule(self, optimizer: torch.optim.Optimizer, max_steps: int) -> Any:
        trainer = self.trainer
        trainer.lr_scheduler, trainer.optimizer = None, optimizer
        try:
            made = trainer.create_scheduler(num_training_steps=max_steps, optimizer=optimizer)
            return trainer.lr_scheduler if made is None else made
        finally:
            trainer.lr_scheduler = trainer.optimizer = None
