"""What a module logs, where it is: by whoever runs the hook around it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from elastic_train.errors import ConfigError

_INSIDE = threading.local()


@dataclass(slots=True, kw_only=True)
class Value:
    """A value with its weight, and of what it is reported: of a step, of an epoch, or of both."""

    value: float
    weight: float
    on_step: bool
    on_epoch: bool


@dataclass(slots=True, kw_only=True, eq=False)
class Logged:
    """What one hook logged. `on_step` and `on_epoch` are what is meant where it does not say."""

    on_step: bool
    on_epoch: bool
    weight: float = 1.0  # of a batch: its samples
    suffix: str = ""  # of one of several data loaders
    values: dict[str, Value] = field(default_factory=dict[str, Value])

    def add(self, name: str, value: Any, **said: Any) -> None:
        """What `self.log` was told. ConfigError for what cannot be put together over workers."""
        where = f"self.log({name!r})"
        reduced = said.get("reduce_fx", "mean")
        if reduced not in ("mean", torch.mean):
            raise ConfigError(
                field=where,
                problem=f"reduce_fx={reduced!r}: values are put together over batches and workers by their "
                "mean.",
                remedy="Log what a mean is made of.",
            )
        if not isinstance(value, torch.Tensor | int | float) or (
            isinstance(value, torch.Tensor) and value.numel() != 1
        ):
            raise ConfigError(
                field=where,
                problem=f"a {type(value).__name__} is no number.",
                remedy="Log numbers, and tensors with one.",
            )
        on_step = self.on_step if said.get("on_step") is None else bool(said["on_step"])
        on_epoch = self.on_epoch if said.get("on_epoch") is None else bool(said["on_epoch"])
        weight = float(said["batch_size"]) if said.get("batch_size") is not None else self.weight
        whole = name + (self.suffix if said.get("add_dataloader_idx", True) else "")
        self.values[whole] = Value(value=_number(value), weight=weight, on_step=on_step, on_epoch=on_epoch)


def _number(value: Any) -> float:
    return float(value.detach()) if isinstance(value, torch.Tensor) else float(value)


@contextmanager
def logging_into(found: Logged) -> Iterator[Logged]:
    """What runs inside, in this thread, logs there."""
    before = getattr(_INSIDE, "found", None)
    _INSIDE.found = found
    try:
        yield found
    finally:
        _INSIDE.found = before


def log(name: str, value: Any, **said: Any) -> None:
    """`self.log` of a module."""
    found: Logged | None = getattr(_INSIDE, "found", None)
    if found is None:
        raise ConfigError(
            field=f"self.log({name!r})",
            problem="nothing is logged in this hook.",
            remedy="Log in training_step, validation_step, and hooks of a step or an epoch.",
        )
    found.add(name, value, **said)


def samples_of(batch: Any) -> float:
    """How many samples a batch has, by its first tensor: as Lightning weighs what is logged."""
    for leaf in _leaves(batch):
        return float(leaf.shape[0]) if leaf.ndim else 1.0
    return 1.0


def _leaves(batch: Any) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, dict):
        for value in batch.values():
            yield from _leaves(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from _leaves(value)
    elif hasattr(batch, "__dict__"):
        for value in vars(batch).values():
            yield from _leaves(value)
