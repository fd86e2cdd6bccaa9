"""An optimizer and a schedule that a script made of its model's parameters, to be made again of a
worker's."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from elastic_train.errors import ConfigError


class GivenOptimizer:
    """The class, the hyperparameters and the groups by names of an optimizer that has not stepped yet."""

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: Any, model: nn.Module) -> None:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        if optimizer.state and not _begins_with_state(optimizer):
            raise ConfigError(
                field="Trainer(optimizers=...)",
                problem="the optimizer has stepped before, and its state would be lost.",
                remedy="Give a new one, or go on from a checkpoint by train(resume_from_checkpoint=...).",
            )
        strange = sum(id(p) not in names for group in optimizer.param_groups for p in group["params"])
        if strange:
            raise ConfigError(
                field="Trainer(optimizers=...)",
                problem=f"the optimizer holds {strange} parameters that are not the model's.",
            )
        self._kind = type(optimizer)
        self._groups = [
            {
                **{k: v for k, v in group.items() if k != "params"},
                "params": [names[id(p)] for p in group["params"]],
            }
            for group in optimizer.param_groups
        ]
        known = inspect.signature(self._kind.__init__).parameters
        self._settings = {name: value for name, value in optimizer.defaults.items() if name in known}
        self._schedule = None
        if schedule is not None:
            self._schedule = copy.copy(schedule)
            self._schedule.optimizer = None

    @property
    def scheduled(self) -> bool:
        return self._schedule is not None

    def made(self, named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        own = dict(named)
        groups = [{**group, "params": [own[name] for name in group["params"]]} for group in self._groups]
        return self._kind(groups, **self._settings)  # type: ignore[call-arg]

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        made = copy.deepcopy(self._schedule)
        assert made is not None
        made.optimizer = optimizer
        settings = [dict(group) for group in optimizer.param_groups]
        torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda _: 1.0
        )  # it has the optimizer count its steps, as torch checks
        for group, before in zip(optimizer.param_groups, settings, strict=True):
            group.update(before)
        return made


def _begins_with_state(optimizer: torch.optim.Optimizer) -> bool:
    """Adagrad has a state before its first step."""
    return all(float(state.get("step", 1)) == 0 for state in optimizer.state.values())
