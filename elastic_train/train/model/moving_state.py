"""Optimizer state outside of `optimizer.state`: group entries and attributes that steps change.

Counters in parameter groups, attributes of the object, and state under keys that are no parameters. Which of
them move is found by stepping a twin over tiny tensors, and by looking at each step. All else in a group is a
setting, and comes from the code.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from elastic_train.errors import ConfigError
from elastic_train.train.model.optimizer_fields import TORCHS_OWN
from elastic_train.train.model.plain_values import Unstorable, decoded, encoded
from elastic_train.train.model.several_models import Optimizers
from elastic_train.train.model.value_prints import print_of

Name = tuple[str, str, str]
"""("group", its number, entry), ("attribute", part, name) or ("state", part, key)."""


@dataclass(slots=True, kw_only=True, eq=False)
class Moving:
    """Which entries move, and what they are at the last boundary, as JSON values."""

    names: set[Name] = field(default_factory=set[Name])
    values: dict[Name, dict[str, Any]] = field(default_factory=dict[Name, dict[str, Any]])

    @contextmanager
    def watching(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """A step belongs inside: what it changes moves."""
        before = prints(optimizer)
        yield
        after = prints(optimizer)
        self.names |= {name for name, mark in after.items() if before.get(name) != mark}

    def compare(self, optimizer: torch.optim.Optimizer, settings: Sequence[Mapping[str, Any]]) -> None:
        """What is in a group and isn't as it was set was changed by hand, and moves."""
        for number, (group, own) in enumerate(zip(optimizer.param_groups, settings, strict=True)):
            for entry, value in group.items():
                if entry != "params" and (entry not in own or print_of(own[entry]) != print_of(value)):
                    self.names.add(("group", str(number), entry))

    def capture(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep what moves as it is now. ConfigError names what cannot be kept."""
        found = _all(optimizer) if self.names else {}
        kept = sorted(self.names & found.keys())
        self.values = {name: _stored(optimizer, name, found[name]) for name in kept}

    def differs(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether something that moves is not as it was captured."""
        found = _all(optimizer)
        return any(
            name in found and _stored(optimizer, name, found[name]) != value
            for name, value in self.values.items()
        )

    def document(self) -> list[list[Any]]:
        return [[*name, value] for name, value in sorted(self.values.items())]

    def restore(
        self, optimizer: torch.optim.Optimizer, document: list[list[Any]], device: torch.device
    ) -> None:
        parts = _parts(optimizer)
        for kind, where, name, value in document:
            self.names.add((kind, where, name))
            self.values[kind, where, name] = value
            now = decoded(value, device)
            if kind == "group" and int(where) < len(optimizer.param_groups):
                optimizer.param_groups[int(where)][name] = now
            elif kind == "attribute" and where in parts:
                setattr(parts[where], name, now)
            elif kind == "state":
                optimizer.state[name] = now  # type: ignore[index]

    def entries(self, number: int) -> frozenset[str]:
        """Those of one group."""
        return frozenset(entry for kind, at, entry in self.names if kind == "group" and at == str(number))


def check_storable(optimizer: torch.optim.Optimizer, names: set[Name]) -> None:
    """ConfigError for what moves and cannot be carried."""
    found = _all(optimizer)
    for name in sorted(names):
        if name in found:
            _stored(optimizer, name, found[name])


def _stored(optimizer: torch.optim.Optimizer, name: Name, value: Any) -> dict[str, Any]:
    kind, where, entry = name
    try:
        return encoded(value)
    except Unstorable as error:
        own = type(_parts(optimizer).get(where, optimizer)).__name__ if kind == "attribute" else ""
        what = {
            "group": f"its steps change {entry!r} of group {where}",
            "attribute": f"its steps change the attribute {entry!r} of {own}",
            "state": f"its steps keep state under {entry!r}, which is no parameter",
        }[kind]
        raise ConfigError(
            field="task.optimizer",
            problem=f"{type(optimizer).__name__}: {what}, and that holds {error}, which would be lost "
            "whenever the group changes.",
            remedy="Keep tensors as optimizer.state[parameter][name], and beside them numbers, texts and "
            "lists of them.",
        ) from error


def prints(optimizer: torch.optim.Optimizer) -> dict[Name, Hashable]:
    """Of everything that could move."""
    return {name: print_of(value) for name, value in _all(optimizer).items()}


def _all(optimizer: torch.optim.Optimizer) -> dict[Name, Any]:
    """Everything that could move."""
    found: dict[Name, Any] = {
        ("group", str(number), entry): value
        for number, group in enumerate(optimizer.param_groups)
        for entry, value in group.items()
        if entry not in ("params", "param_names")
    }
    for part, own in _parts(optimizer).items():
        found |= {("attribute", part, n): v for n, v in vars(own).items() if n not in TORCHS_OWN}
    for key, value in optimizer.state.items():
        if not isinstance(key, torch.Tensor):
            found["state", "", str(key)] = value
    return found


def _parts(optimizer: torch.optim.Optimizer) -> dict[str, torch.optim.Optimizer]:
    return dict(optimizer.parts) if isinstance(optimizer, Optimizers) else {"": optimizer}
