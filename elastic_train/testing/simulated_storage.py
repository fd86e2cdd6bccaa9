"""Simulated storage: a commit log with fences, and outages."""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic_train.control.commands import Commit
from elastic_train.recovery.evidence import Stored


@dataclass(slots=True)
class SimulatedStorage:
    """The newest fence wins: a commit of an older term is refused."""

    fence: int = 0
    slots: int = 0
    kept: dict[int, Stored] = field(default_factory=dict[int, Stored])
    damaged: set[int] = field(default_factory=set[int])
    ever: bool = False
    down_until: float = 0.0

    def begin(self, term: int) -> None:
        self.fence = term
        self.slots += 1

    def commit(self, term: int, command: Commit) -> Stored | None:
        """The checkpoint's record, the known one if it was committed before; None behind a higher fence."""
        if term < self.fence:
            return None
        for stored in self.kept.values():
            if (stored.generation, stored.step) == (command.generation, command.step):
                return stored
        self.slots += 1
        stored = Stored(
            slot=self.slots,
            step=command.step,
            generation=command.generation,
            term=term,
            path=f"checkpoints/step-{command.step:010d}.g{command.generation}",
        )
        self.kept[stored.slot] = stored
        self.ever = True
        return stored

    def prune(self, term: int, keep: tuple[int, ...]) -> None:
        if term < self.fence:
            return
        self.kept = {slot: stored for slot, stored in self.kept.items() if slot in keep}
        assert self.kept, "at every instant one loadable checkpoint exists"

    def newest(self) -> Stored | None:
        """The newest record; nobody has read what it stands for."""
        return self.kept[max(self.kept)] if self.kept else None

    def sound(self, below: int) -> Stored | None:
        """The newest checkpoint that reads well, older than a slot."""
        slots = [slot for slot in self.kept if slot < below and slot not in self.damaged]
        return self.kept[max(slots)] if slots else None

    def damage(self) -> None:
        if self.kept:
            self.damaged.add(max(self.kept))
