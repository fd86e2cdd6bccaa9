"""The user's optimizer: built over the whole meta model, then moved onto this rank's shards.

Its code runs once. The same object goes on with the shards in the places of the whole parameters, all groups
and hyperparameters kept, empty groups too.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from elastic_train.errors import ConfigError
from elastic_train.train.model.optimizer_fields import TORCHS_OWN
from elastic_train.train.model.optimizer_reach import check_reach
from elastic_train.train.model.several_models import Optimizers, check_optimizer
from elastic_train.train.task import Task

Groups = tuple[tuple[str, ...], ...]
"""The fqns of each parameter group, in order."""


def describe(task: Task, parameters: Mapping[str, nn.Parameter]) -> tuple[torch.optim.Optimizer, Groups]:
    """Call the task's `optimizer` on whole parameters; the optimizer, and the fqns of each of its groups."""
    optimizer = check_optimizer("task.optimizer", task.optimizer(list(parameters.items())))
    known = {id(p): fqn for fqn, p in parameters.items()}
    foreign = sum(id(p) not in known for group in optimizer.param_groups for p in group["params"])
    if foreign:
        raise ConfigError(
            field="task.optimizer",
            problem=f"{type(optimizer).__name__} holds {foreign} parameters that were not passed to it.",
            remedy="Build it from named_params.",
        )
    check_reach(optimizer, known)
    return optimizer, names_of(optimizer, parameters)


def names_of(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> Groups:
    """What an optimizer holds, by the names of these parameters; all of it is among them."""
    known = {id(p): fqn for fqn, p in parameters.items()}
    return tuple(tuple(known[id(p)] for p in group["params"]) for group in optimizer.param_groups)


def move(
    optimizer: torch.optim.Optimizer, groups: Groups, parameters: Mapping[str, nn.Parameter]
) -> torch.optim.Optimizer:
    """The optimizer with `parameters`, the shards, in its groups; its state is what it makes at the start.

    Groups hold what this rank has of them.
    """
    here = [[parameters[fqn] for fqn in group if fqn in parameters] for group in groups]
    if optimizer.state:  # made eagerly, as Adagrad does, for the whole: make it again for the shards
        return rebuilt(optimizer, here)
    for group, own in zip(optimizer.param_groups, here, strict=True):
        group["params"][:] = own
    return optimizer


def rebuilt(optimizer: torch.optim.Optimizer, groups: list[list[Any]]) -> torch.optim.Optimizer:
    """A new optimizer of the same class and hyperparameters over other tensors, one list per group."""
    arguments = inspect.signature(type(optimizer).__init__).parameters
    needed = {
        name
        for name, p in list(arguments.items())[2:]
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    settings = {k: v for k, v in optimizer.defaults.items() if k in arguments}
    if needed - set(settings):
        raise ConfigError(
            field="task.optimizer",
            problem=(
                f"{type(optimizer).__name__} makes its state when it is built and cannot be built again: its "
                f"defaults lack {sorted(needed - set(settings))}."
            ),
            remedy="Keep every argument in `defaults`, or make the state at the first step().",
        )
    described = [
        {**{k: v for k, v in group.items() if k != "params"}, "params": params}
        for group, params in zip(optimizer.param_groups, groups, strict=True)
    ]
    return type(optimizer)(described, **settings)


def twin(optimizer: torch.optim.Optimizer, groups: list[list[torch.Tensor]]) -> torch.optim.Optimizer:
    """The optimizer over other tensors, with a state of its own: to try out what it does."""
    if isinstance(optimizer, Optimizers):
        parts: dict[str, torch.optim.Optimizer] = {}
        for name, part in optimizer.parts.items():
            parts[name] = twin(part, groups[: len(part.param_groups)])
            groups = groups[len(part.param_groups) :]
        return Optimizers(parts)
    if optimizer.state:
        return rebuilt(optimizer, groups)
    copied = object.__new__(type(optimizer))
    shared = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    copied.__dict__.update({n: _apart(n, v, shared) for n, v in optimizer.__dict__.items()})
    copied.state = type(optimizer.state)(dict)
    copied.param_groups = [
        {**{n: _apart(n, v, shared) for n, v in group.items()}, "params": params}
        for group, params in zip(optimizer.param_groups, groups, strict=True)
    ]
    return copied


def _apart(name: str, value: Any, shared: Mapping[int, Any]) -> Any:
    """A copy of an attribute, so that a trial changes nothing; what cannot be copied stays shared."""
    if name in TORCHS_OWN or name == "params":
        return value
    try:
        return copy.deepcopy(value, dict(shared))
    except (TypeError, RuntimeError, NotImplementedError):
        return value


def hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's settings as JSON values; what is no number, text or flag is left out."""
    found: dict[str, Any] = {}
    for name, value in group.items():
        if name in ("params", "param_names"):
            continue
        plain = _plain(value)
        if plain is not None or value is None:
            found[name] = plain
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else None
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    return None
