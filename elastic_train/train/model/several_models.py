"""Several models as one module and several optimizers as one optimizer, for loops."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from elastic_train.errors import ConfigError


class Models(nn.Module):
    """Models by name, which begins the names of their tensors. It is called with a batch and returns it."""

    def forward(self, batch: Any) -> Any:
        return batch


class Optimizers(torch.optim.Optimizer):
    """One after the other. They share their groups and their state with this one, in the order of `parts`."""

    def __init__(self, parts: Mapping[str, torch.optim.Optimizer]) -> None:
        groups = [group for part in parts.values() for group in part.param_groups]
        super().__init__([{"params": group["params"]} for group in groups], {})
        self.param_groups = groups
        self.parts = dict(parts)
        for part in parts.values():
            part.state = self.state

    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Those parameters that have a gradient."""
        for _, part in self._lent():
            part.step()

    def step_one(self, name: str, closure: Callable[[], Any]) -> None:
        """Of one that computes the loss itself."""
        for own, part in self._lent():
            if own == name:
                part.step(closure)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for _, part in self._lent():
            part.__setstate__({"state": self.state, "param_groups": part.param_groups})

    @contextmanager
    def only(self, name: str) -> Iterator[None]:
        """Within it no other optimizer's parameters have a gradient. They are put back afterwards."""
        others = [p for n, part in self._lent() if n != name for g in part.param_groups for p in g["params"]]
        kept = [p.grad for p in others]
        for parameter in others:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in zip(others, kept, strict=True):
                parameter.grad = gradient

    def _lent(self) -> Iterator[tuple[str, torch.optim.Optimizer]]:
        """Each with the groups and state that this one has: a copy of it, made for a trial, has its own."""
        start = 0
        for name, part in self.parts.items():
            groups, state = part.param_groups, part.state
            stop = start + len(groups)
            part.param_groups, part.state = self.param_groups[start:stop], self.state
            try:
                yield name, part
            finally:
                part.param_groups, part.state = groups, state
            start = stop


def check_groups(optimizer: Optimizers) -> None:
    """ConfigError where a loop gave an optimizer other groups."""
    ours = {id(group) for group in optimizer.param_groups}
    for name, part in optimizer.parts.items():
        if any(id(group) not in ours for group in part.param_groups):
            raise ConfigError(
                field=f"ctx.optimizer({name!r})",
                problem="it was given another parameter group while it trains, which no other worker would "
                "know of.",
                remedy="Declare all groups where it is made; set requires_grad, or a group's lr to 0, for "
                "what trains later.",
            )


def check_model(name: str, model: object) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise ConfigError(
            field=f"ctx.model({name!r})", problem=f"returned {type(model).__name__}, not an nn.Module."
        )
    return model


def check_optimizer(field: str, optimizer: object) -> torch.optim.Optimizer:
    """ConfigError, about `field`, for what is none, or cannot do a step without calling back for the loss."""
    name = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(field=field, problem=f"made {name}, not a torch.optim.Optimizer.")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            field=field,
            problem=f"{name} computes the loss several times per step, which a voted step cannot do.",
            remedy="Choose an optimizer whose step() needs no closure.",
        )
    return optimizer
