"""The module that is trained: a LightningModule whose steps are its forward, so that whatever watches or
divides a forward is around them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from elastic_train.errors import ConfigError
from elastic_train.integrations.lightning.hooks import transferred
from elastic_train.integrations.lightning.logged import Logged, logging_into, samples_of


class Steps(nn.Module):
    """Named "lightning" in the run, so that a parameter's name is "lightning." and its own."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(
        self, kind: str, batch: Any, batch_idx: int, loader: int = 0, loaders: int = 1
    ) -> tuple[Any, Logged]:
        """What `training_step` or `validation_step` returned, and what it logged."""
        batch = transferred(self.module, batch, loader)
        training = kind == "training_step"
        said = Logged(
            on_step=training,
            on_epoch=not training,
            weight=samples_of(batch),
            suffix=f"/dataloader_idx_{loader}" if loaders > 1 else "",
        )
        step = getattr(self.module, kind)
        with logging_into(said) as found:
            return step(*arguments_of(step, batch, batch_idx, loader, loaders)), found


def arguments_of(
    step: Callable[..., Any], batch: Any, batch_idx: int, loader: int, loaders: int
) -> tuple[Any, ...]:
    """As many of a step's arguments as it takes."""
    given = (batch, batch_idx, loader) if step.__name__ == "validation_step" else (batch, batch_idx)
    taken = inspect.signature(step).parameters.values()
    if any(each.kind is each.VAR_POSITIONAL for each in taken):
        return given if loaders > 1 else given[:2]
    positional = [each for each in taken if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    return given[: len(positional)]


def loss_of(output: Any) -> torch.Tensor:
    """The loss that `training_step` returned; ConfigError where there is none."""
    found = output.get("loss") if isinstance(output, Mapping) else output
    if isinstance(found, torch.Tensor):
        return found
    raise ConfigError(
        field="training_step",
        problem=f"returned {type(output).__name__}, and no loss: which batches are left out would depend on "
        "the plan.",
        remedy='Return the loss, or a dict with "loss"; leave a batch out by a loss times zero.',
    )


def sizes_of(module: Any) -> dict[str, int]:
    """How much is in the containers that a module keeps as attributes."""
    return {
        name: len(value)
        for name, value in vars(module).items()
        if isinstance(value, list | dict | set) and not name.startswith("_")
    }
