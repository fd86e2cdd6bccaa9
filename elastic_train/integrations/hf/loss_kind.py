"""What a trainer's loss is a mean over, told from its first batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from elastic_train.errors import ConfigError
from elastic_train.integrations.hf.carried import Asked, Carried

NEAR = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class LossKind:
    """`by_items`: it is divided by the number of labels that it is told; else it is a mean over a
    micro-batch. `scaled`: transformers takes it for one of the whole accumulated batch, and adds
    micro-batches up."""

    by_items: bool
    scaled: bool

    def count(self, items: Any, *, micro_batches: int, devices: int) -> Any:
        """What a micro-batch's loss counts for, in a step of so many of them."""
        if self.by_items:
            return items if self.scaled else items * (micro_batches / devices)
        return devices / micro_batches if self.scaled else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """How many micro-batches a step has: `size` samples each, `batch` of them together, `length` in
    an epoch."""

    length: int
    size: int
    batch: int

    @property
    def per_epoch(self) -> int:
        return -(-self.length // self.batch)

    def micro_batches(self, step: int) -> int:
        """Of a step, from 1 on."""
        begins = (step - 1) % self.per_epoch * self.batch
        return -(-min(self.batch, self.length - begins) // self.size)

    def epoch(self, step: int, batches: int) -> float:
        """Where a step ends, as transformers tells it: the share of the epoch's batches counts. `batches` are
        those of an accumulated batch."""
        whole, at = divmod(step - 1, self.per_epoch)
        in_epoch = -(-self.length // self.size)
        return whole + min((at + 1) * batches, in_epoch) / in_epoch


def kind_of(carried: Carried, batch: Mapping[str, Any]) -> LossKind:
    """ConfigError where the loss of a batch is neither, or where the model can't be called around it."""
    trainer, model = carried.trainer, carried.trainer.model
    items = carried.items(batch)
    told = trainer.loss_is_scaled_for_ga
    scaled = (
        bool(told)
        if told is not None
        else (trainer.model_accepts_loss_kwargs and items is not None)
        or trainer.compute_loss_func is not None
    )
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            losses = [_loss(carried, model, batch, items if items is None else items * n) for n in (1, 2)]
    finally:
        model.train(training)
    once, twice = losses
    if items is None or _near(once, twice):
        return LossKind(by_items=False, scaled=scaled)
    if _near(once, 2 * twice) or not math.isfinite(once):
        return LossKind(by_items=True, scaled=scaled)
    raise ConfigError(
        field="Trainer.compute_loss",
        problem=f"its loss is {once:.6g} for num_items_in_batch={int(items)} and {twice:.6g} for twice as "
        "many: it is neither divided by that number nor independent of it.",
        remedy="A part of it that is no mean over tokens, such as the loss of a router, has to be left out "
        "(output_router_logits=False) or divided by num_items_in_batch too.",
    )


def _loss(carried: Carried, model: Any, batch: Mapping[str, Any], items: Any) -> float:
    asked, again = carried.asked(batch, items), carried.asked(batch, items)
    if asked is None or again is None:
        raise ConfigError(field="Trainer.compute_loss", problem="it does not call the model.")
    if not _same(asked, again):
        raise ConfigError(
            field="Trainer.compute_loss",
            problem="it calls the model with other inputs when it is asked again.",
            remedy="Draw random inputs in the data collator, where they are seeded by step and micro-batch.",
        )
    if asked.positional and asked.named:
        raise ConfigError(
            field="Trainer.compute_loss",
            problem="it calls the model with arguments by position and by name.",
            remedy="Name them all: model(**inputs).",
        )
    loss, calls = carried.loss(model(*asked.positional, **asked.named), batch, items)
    if calls != 1:
        raise ConfigError(
            field="Trainer.compute_loss",
            problem=f"it calls the model {calls} times.",
            remedy="What several calls make is a loop: see docs/loops.md.",
        )
    return float(loss.mean())


def _same(first: Asked, second: Asked) -> bool:
    ours, theirs = (*first.positional, *first.named.values()), (*second.positional, *second.named.values())
    pairs = zip(ours, theirs, strict=True) if len(ours) == len(theirs) else [(0, 1)]
    return all(
        torch.equal(a, b)
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        else type(a) is type(b)
        for a, b in pairs
    )


def _near(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=NEAR)
