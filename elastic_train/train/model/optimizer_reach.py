"""Find other optimizers and tensors that an optimizer refers to beside its parameter groups.

The groups are given the shards in the places of the whole tensors. Whatever else holds the tensors that the
optimizer was built with goes on with those, which nobody trains.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from elastic_train.errors import ConfigError
from elastic_train.train.model.closures import cells_of
from elastic_train.train.model.optimizer_fields import TORCHS_OWN
from elastic_train.train.model.several_models import Optimizers

_DEPTH = 4


def check_reach(optimizer: torch.optim.Optimizer, known: Mapping[int, str]) -> None:
    """ConfigError for what would be left behind. `known` are names of the tensors that it was built with, by
    id."""
    parts = optimizer.parts.values() if isinstance(optimizer, Optimizers) else (optimizer,)
    for part in parts:
        for name, value in _held(part):
            if isinstance(value, torch.optim.Optimizer) and value.state is not part.state:
                raise ConfigError(
                    field="task.optimizer",
                    problem=f"{type(part).__name__} keeps a {type(value).__name__} as {name!r}, whose state "
                    "would be lost whenever the group changes.",
                    remedy="Let both share one, inner.state = self.state, with names of their own in it, or "
                    "write it as one optimizer.",
                )
            for tensor in _tensors(value, {id(group["params"]) for group in part.param_groups}, _DEPTH):
                if id(tensor) in known:
                    raise ConfigError(
                        field="task.optimizer",
                        problem=f"{name!r} of {type(part).__name__} holds the parameter "
                        f"{known[id(tensor)]!r} beside the parameter groups, where it would stay as it is "
                        "while another one trains.",
                        remedy="Reach parameters by optimizer.param_groups: give what is not trained a group "
                        "of its own.",
                    )


def _held(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    """By name: its attributes, and what the hooks of its steps hold."""
    for name, value in vars(optimizer).items():
        if name not in TORCHS_OWN:
            yield name, value
    for kind in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        for hook in vars(optimizer).get(kind, {}).values():
            held = [value for value in cells_of(hook) if value is not vars(optimizer)]
            yield getattr(hook, "__qualname__", type(hook).__name__), held


def _tensors(value: Any, groups: set[int], depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _tensors(key, groups, depth - 1)
            yield from _tensors(inner, groups, depth - 1)
    elif depth and isinstance(value, list | tuple | set) and id(value) not in groups:
        for inner in value:
            yield from _tensors(inner, groups, depth - 1)
