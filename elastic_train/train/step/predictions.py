"""Metrics over all predictions: collected by micro-batch, computed on rank 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from elastic_train.errors import ConfigError
from elastic_train.train.model.leaves import mapped

Kept = dict[int, Any]
"""By index of its micro-batch, what was kept of it."""


def on_host(value: Any) -> Any:
    """What is kept, off the device and out of the graph."""
    return mapped(value, lambda leaf: leaf.detach().cpu())


def joined(parts: Sequence[Any]) -> Any:
    """Tensors one behind the other along their first dim, in mappings and sequences too; lists added up."""
    first = parts[0]
    if isinstance(first, torch.Tensor):
        return torch.cat([part.reshape(1) if part.ndim == 0 else part for part in parts])
    if isinstance(first, Mapping):
        return {key: joined([part[key] for part in parts]) for key in first}
    if isinstance(first, tuple):
        return tuple(joined(column) for column in zip(*parts, strict=True))
    if isinstance(first, list):
        return [element for part in parts for element in part]
    raise ConfigError(
        field="task.evaluation.keep",
        problem=f"it returned a {type(first).__name__}.",
        remedy="Return a tensor, a list, or a dict or tuple of these, with a row for each sample.",
    )


def summarised(kept: Kept, summary: Callable[[Any], Any], *, world_size: int) -> dict[str, float]:
    """`summary` of everything that was kept, made on rank 0 and broadcast. All ranks call it together."""
    everyone: list[Any] = [None] * world_size
    rank = dist.get_rank() if world_size > 1 else 0
    if world_size > 1:
        dist.gather_object(kept, everyone if rank == 0 else None)
    else:
        everyone = [kept]
    reported: list[Any] = [None]
    if rank == 0:
        together = {index: part for found in everyone for index, part in found.items()}
        reported = [_numbers(summary(joined([together[index] for index in sorted(together)])))]
    if world_size > 1:
        dist.broadcast_object_list(reported)
    return reported[0]


def _numbers(found: Any) -> dict[str, float]:
    if not isinstance(found, Mapping):
        raise ConfigError(
            field="task.evaluation.summary",
            problem=f"it must return a mapping from names to numbers, not {type(found).__name__}.",
        )
    return {str(name): float(value) for name, value in found.items()}
