"""An update that is applied parameter by parameter: how far it got, and how it is completed or undone.

With the optimizer in backward an update may be interrupted between two parameters. Until the step's vote has
passed, everything that the update of one parameter doesn't touch, schedule and buffers, stays at the step
before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from elastic_train.recovery.evidence import Vote


@dataclass(slots=True, kw_only=True, eq=False)
class Progressive:
    """`behind` and `kept` are at `step` - 1, `kept` with the reduced gradient or the new value; `ahead` at
    `step`. They name parameters that are trained and buffers that the step changes.

    `opening` is what the ranks agreed on before they updated anything, `groups` the number of each
    parameter's group, `settings` each group's hyperparameters during the step. `finished`: the vote passed,
    schedule and buffers are at `step` too.
    """

    step: int
    opening: Vote
    groups: Mapping[str, int]
    settings: list[dict[str, Any]]
    applied: Vote | None  # the outcome that led to step - 1
    schedule: Mapping[str, Any] | None  # the scheduler's state at step - 1
    behind: set[str]
    kept: set[str] = field(default_factory=set)
    ahead: set[str] = field(default_factory=set)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)  # at step - 1, once finished
    finished: bool = False
    undoable: bool = True

    @property
    def begun(self) -> bool:
        """Whether anything is beyond step - 1, or could be."""
        return bool(self.ahead or self.kept)

    def reduced(self, name: str) -> None:
        """What a name needs to get to `step` is here."""
        self.behind.discard(name)
        self.kept.add(name)

    def stays(self, name: str) -> None:
        """A name cannot get to `step`."""
        self.kept.discard(name)
        self.behind.add(name)

    def arrived(self, name: str) -> None:
        """A name is at `step`."""
        self.behind.discard(name)
        self.kept.discard(name)
        self.ahead.add(name)


@contextmanager
def only(optimizer: torch.optim.Optimizer, chosen: Mapping[int, list[nn.Parameter]]) -> Iterator[None]:
    """Inside, the optimizer's groups hold these parameters alone, by the number of their group."""
    whole = [group["params"] for group in optimizer.param_groups]
    for number, group in enumerate(optimizer.param_groups):
        group["params"] = chosen.get(number, [])
    try:
        yield
    finally:
        for group, parameters in zip(optimizer.param_groups, whole, strict=True):
            group["params"] = parameters
