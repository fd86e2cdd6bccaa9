"""What a task measures of each step's own micro-batches, beside the loss: means over the global batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from elastic_train.errors import ConfigError
from elastic_train.train.best_metric import LOSS
from elastic_train.train.model.rng import preserved
from elastic_train.train.state.shards import Shards
from elastic_train.train.task import Task

NAMES = 2048
"""Bytes of all names together: ranks tell each other in one tensor."""


def measures(task: Task) -> bool:
    return type(task).metrics is not Task.metrics


class TrainingMetrics:
    """Of one generation. `add` what was computed, then `means` once a step, on all ranks."""

    def __init__(self, task: Task, shards: Shards) -> None:
        self._task, self._shards = task, shards
        self._names: tuple[str, ...] | None = None
        self._sums: dict[str, tuple[float, float]] = {}

    @property
    def sums(self) -> Mapping[str, tuple[float, float]]:
        """Of this rank's micro-batches so far: by name a sum and what it is a sum over."""
        return self._sums

    def begin(self, sums: Mapping[str, tuple[float, float]] = MappingProxyType({})) -> None:
        """A step begins, with what was measured of it already."""
        self._sums = dict(sums)

    def add(self, output: Any, micro_batch: Any) -> None:
        """Of a micro-batch that counts."""
        with torch.no_grad(), preserved(self._shards.device):
            found = self._task.metrics(output, micro_batch)
        for name, (total, count) in _checked(found).items():
            before = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = before[0] + total, before[1] + count

    def means(self) -> dict[str, float]:
        """By name; NaN where nothing was counted."""
        if self._names is None:
            self._names = self._agreed()
        own = "\0".join(sorted(self._sums))
        if own and own != "\0".join(self._names):
            raise ConfigError(
                field="task.metrics",
                problem=f"it must return the same names for every micro-batch, here {sorted(self._sums)}, "
                f"elsewhere {list(self._names)}.",
            )
        pairs = [self._sums.get(name, (0.0, 0.0)) for name in self._names]
        speaks = self._shards.place.speaks
        table = torch.tensor(pairs, dtype=torch.float64, device=self._shards.device)
        table = table if speaks else torch.zeros_like(table)
        if self._shards.plan.world_size > 1:
            dist.all_reduce(table)
        found = zip(self._names, table.reshape(-1, 2).tolist(), strict=True)
        return {name: total / count if count > 0 else math.nan for name, (total, count) in found}

    def _agreed(self) -> tuple[str, ...]:
        """A rank without a micro-batch, or without the output, knows none by itself."""
        own = "\0".join(sorted(self._sums)).encode()
        if len(own) > NAMES:
            raise ConfigError(field="task.metrics", problem=f"its names are more than {NAMES} letters.")
        if self._shards.plan.world_size > 1:
            letters = torch.zeros(NAMES, dtype=torch.uint8)
            letters[: len(own)] = torch.tensor(list(own), dtype=torch.uint8)
            letters = letters.to(self._shards.device)
            dist.all_reduce(letters, dist.ReduceOp.MAX)
            own = bytes(letters.tolist()).rstrip(b"\0")
        return tuple(own.decode(errors="replace").split("\0")) if own else ()


def _checked(found: Any) -> dict[str, tuple[float, float]]:
    if not isinstance(found, Mapping) or LOSS in found:
        what = f"a {type(found).__name__}" if not isinstance(found, Mapping) else f"{LOSS!r}"
        raise ConfigError(
            field="task.metrics",
            problem=f"it returned {what}; wanted are names, other than {LOSS!r}, with pairs of a sum and "
            "what it is a sum over.",
        )
    pairs: dict[str, tuple[float, float]] = {}
    for name, pair in found.items():
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ConfigError(
                field="task.metrics",
                problem=f"{name!r} must be a pair of a sum and what it is a sum over, not "
                f"{type(pair).__name__}.",
                remedy="Return {'accuracy': ((output.argmax(-1) == labels).sum(), len(labels))}.",
            )
        pairs[str(name)] = float(pair[0]), float(pair[1])
    return pairs
