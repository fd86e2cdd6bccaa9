"""Collate samples into a micro-batch, move it to the device, and call the model with it."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import Any

import torch
from torch import nn
from torch.utils.data._utils.collate import collate as torch_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from elastic_train.errors import ConfigError
from elastic_train.train.model.leaves import mapped, moves_itself, with_attributes

Collate = Callable[[list[Any]], Any]
"""What makes a micro-batch of its samples."""


def collate(samples: Sequence[Any], device: torch.device, floating: torch.dtype) -> Any:
    """Samples stacked along a new first dim, on the device."""
    return placed(stacked(list(samples)), device, floating)


def placed(batch: Any, device: torch.device, floating: torch.dtype) -> Any:
    """Everything in a micro-batch on the device; floating numbers in the run's own dtype.

    An object with a method `to` is moved by that, and its floating tensors are cast where it holds them.
    """

    def place(leaf: torch.Tensor) -> torch.Tensor:
        return leaf.to(device=device, dtype=floating if leaf.is_floating_point() else leaf.dtype)

    def cast(leaf: torch.Tensor) -> torch.Tensor:
        return leaf.to(floating) if leaf.is_floating_point() else leaf

    def move(value: Any) -> Any:
        moved = value.to(device)
        moved = value if moved is None else moved
        if isinstance(moved, torch.nn.utils.rnn.PackedSequence):
            return moved.to(floating) if moved.data.is_floating_point() else moved
        inside = {name: mapped(part, cast) for name, part in getattr(moved, "__dict__", {}).items()}
        return with_attributes(moved, inside)

    return mapped(batch, place, move)


def stacked(samples: list[Any]) -> Any:
    """As torch's DataLoader does it, and dataclasses field by field; what is None in each sample stays None.

    ConfigError where samples don't fit together.
    """
    try:
        return torch_collate(samples, collate_fn_map=_KINDS)
    except (RuntimeError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(
            field="task.collate",
            problem=f"the samples of a micro-batch cannot be stacked: {str(error).splitlines()[0]}",
            remedy="Define collate(samples) in the task: it gets a list of samples and returns what inputs "
            "and loss are given. In a loop, pass collate= to ctx.batches(...).",
        ) from error


class _Records(type):
    """Instances of dataclasses that aren't mappings as well."""

    def __instancecheck__(cls, value: object) -> bool:
        return dataclasses.is_dataclass(value) and not isinstance(value, type | Mapping | tuple)


class _Record(metaclass=_Records):
    pass


def _stack_records(samples: Sequence[Any], *, collate_fn_map: Any = None) -> Any:
    names = [field.name for field in dataclasses.fields(samples[0])]
    columns = {name: [getattr(sample, name) for sample in samples] for name in names}
    parts = {name: torch_collate(column, collate_fn_map=_KINDS) for name, column in columns.items()}
    return with_attributes(samples[0], parts)


def _stack_nones(samples: Sequence[Any], *, collate_fn_map: Any = None) -> None:
    if any(sample is not None for sample in samples):
        raise TypeError("some samples have None where others have a value")


_KINDS: dict[Any, Callable[..., Any]] = {
    **default_collate_fn_map,
    NoneType: _stack_nones,
    _Record: _stack_records,
}


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
        # A PackedSequence is a tuple, and one argument.
        several = isinstance(inputs, tuple) and not moves_itself(inputs)
        return model(*inputs) if several else model(inputs)

    return call
