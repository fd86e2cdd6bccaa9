"""A trainer's training problem as a task."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

import elastic_train as et
from elastic_train.errors import ConfigError
from elastic_train.integrations.hf.carried import Carried
from elastic_train.integrations.hf.evaluation import Measures
from elastic_train.integrations.hf.given_model import Values, built_from
from elastic_train.integrations.hf.given_optimizer import GivenOptimizer
from elastic_train.integrations.hf.loss_kind import LossKind, Steps
from elastic_train.integrations.hf.sample_order import BatchesToEvaluate, InOrder

EVALUATED = "_evaluated"
"""Entry of a micro-batch that is evaluated: the name of its data set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """What is evaluated while the run trains, and how often."""

    batches: BatchesToEvaluate
    every: int | Literal["epoch"]
    measures: Measures
    patience: int | None
    watch: str
    order: Literal["min", "max"]


class TrainerTask(et.Task):
    """What `Trainer.train` trains."""

    def __init__(
        self,
        *,
        carried: Carried,
        structure: bytes,
        values: Values,
        samples: InOrder,
        collator: Any,
        kind: LossKind,
        steps: Steps,
        devices: int,
        max_steps: int,
        optimizer: GivenOptimizer | None,
        evaluated: Evaluated | None,
        watched: str,
    ) -> None:
        """`watched` is the metric that a schedule is stepped by, "" for one that counts steps."""
        self._carried, self._structure, self._values = carried, structure, values
        self._samples, self._collator, self._kind = samples, collator, kind
        self._max_steps, self._optimizer, self._evaluated = max_steps, optimizer, evaluated
        self._watched, self._steps, self._devices = watched, steps, devices

    def model(self) -> nn.Module:
        model = built_from(self._structure)
        self._carried.built(model)
        return model

    def init(self, module: nn.Module, fqn: str) -> None:
        self._values.give(module, fqn)

    def optimizer(self, named_params: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        if self._optimizer is not None:
            return self._optimizer.made(named_params)
        return self._carried.optimizer(named_params)

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        if self._optimizer is not None and self._optimizer.scheduled:
            made = self._optimizer.schedule(optimizer)
        else:
            made = self._carried.schedule(optimizer, self._max_steps)
        return (made, self._watched) if self._watched else made

    def dataset(self) -> InOrder:
        return self._samples

    def collate(self, samples: list[Any]) -> dict[str, Any]:
        if self._evaluated is not None and _is_batch(samples):
            name, items = samples[0]
            return {**self._collator(items), EVALUATED: name}
        return dict(self._collator(samples))

    def inputs(self, micro_batch: Any) -> Any:
        batch = _plain(micro_batch)
        asked = self._carried.asked(batch, self._items(batch))
        if asked is None:
            raise ConfigError(field="Trainer.compute_loss", problem="it does not call the model.")
        return asked.positional if asked.positional else asked.named

    def loss(self, output: Any, micro_batch: Any, step: int = 1) -> tuple[torch.Tensor, Any]:
        batch = _plain(micro_batch)
        total, _ = self._carried.loss(output, batch, self._items(batch))
        several = self._steps.micro_batches(step)
        items = self._carried.items(batch) if self._kind.by_items else None
        return total, self._kind.count(items, micro_batches=several, devices=self._devices)

    def evaluation(self) -> et.Evaluation | None:
        told = self._evaluated
        if told is None:
            return None
        keeps = told.measures.keeps
        return et.Evaluation(
            dataset=told.batches,
            micro_size=1,
            every=told.every,
            metric=self._measured,
            keep=self._kept if keeps else None,
            summary=told.measures.summary if keeps else None,
            patience=told.patience,
            watch=told.watch if told.patience else "",
            order=told.order if told.patience else "min",
        )

    def _items(self, batch: Mapping[str, Any]) -> torch.Tensor | None:
        """What the loss is told of the number of labels: 1 makes a sum of what is divided by it."""
        items = self._carried.items(batch)
        return torch.ones_like(items) if items is not None and self._kind.by_items else items

    def _mean(self, output: Any, micro_batch: Any) -> torch.Tensor:
        batch = _plain(micro_batch)
        total, _ = self._carried.loss(output, batch, self._items(batch))
        items = self._carried.items(batch) if self._kind.by_items else None
        mean = total.detach() if items is None else total.detach() / items
        return mean.mean()

    def _measured(self, output: Any, micro_batch: Any) -> dict[str, tuple[Any, Any]]:
        assert self._evaluated is not None
        batch, name = _plain(micro_batch), micro_batch[EVALUATED]
        return self._evaluated.measures.losses(self._mean(output, micro_batch), batch, name)

    def _kept(self, output: Any, micro_batch: Any) -> list[Any]:
        assert self._evaluated is not None
        batch, name = _plain(micro_batch), micro_batch[EVALUATED]
        mean = self._mean(output, micro_batch)
        return [self._evaluated.measures.kept(self._carried.trainer, output, batch, name, mean)]


def _plain(micro_batch: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in micro_batch.items() if name != EVALUATED}


def _is_batch(samples: list[Any]) -> bool:
    """Whether these are batches to evaluate: pairs of a data set's name and its samples."""
    first = samples[0]
    return (
        isinstance(first, tuple)
        and len(first) == 2
        and isinstance(first[0], str)
        and isinstance(first[1], list)
    )
