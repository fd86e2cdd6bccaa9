"""Samples become tensors, tensors become the model's arguments, and padded rows are cut away."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.data import default_collate

from elastic_train.errors import ConfigError


def collate(samples: Sequence[Any], device: torch.device, floating: torch.dtype) -> Any:
    """Stack samples along a new first dim, on the device; floating numbers in the run's own dtype."""

    def place(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.to(device=device, dtype=floating if leaf.is_floating_point() else leaf.dtype)

    return tree_map(place, default_collate(list(samples)))


def rows(value: Any, *, size: int, real: int) -> Any:
    """The first `real` of `size` rows of every tensor in `value` whose first dim has `size`."""
    if real == size:
        return value

    def first(leaf: Any) -> Any:
        batched = isinstance(leaf, torch.Tensor) and leaf.ndim > 0 and leaf.shape[0] == size
        if batched or (isinstance(leaf, list) and len(leaf) == size):
            return leaf[:real]
        return leaf

    return tree_map(first, value)


def caller(model: nn.Module, beside: Sequence[str] = (), hands_on: str = "") -> Callable[..., Any]:
    """Calls the model with what `Task.inputs` returned.

    With what an earlier stage handed on as a second argument, the model is called with that and those of the
    inputs that are named `beside` it, where there are any. With `hands_on` that field of the output is
    returned.
    """
    parameters = inspect.signature(model.forward).parameters.values()
    names = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)

    def call(inputs: Any, received: torch.Tensor | None = None) -> Any:
        output = called(inputs, received)
        return getattr(output, hands_on) if hands_on else output

    def called(inputs: Any, received: torch.Tensor | None) -> Any:
        if received is not None:
            there = inputs if isinstance(inputs, Mapping) else {}
            return model(received, **{name: there[name] for name in beside if name in there})
        if isinstance(inputs, Mapping):
            named = {k: v for k, v in inputs.items() if takes_any or k in names}
            if not named:
                raise ConfigError(
                    field="task.inputs",
                    problem=f"a sample has the entries {sorted(inputs)} and forward takes {names}.",
                    remedy="Define inputs(micro_batch) in the task.",
                )
            return model(**named)
        return model(*inputs) if isinstance(inputs, tuple) else model(inputs)

    return call
