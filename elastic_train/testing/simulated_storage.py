"""Simulated storage: parts that take their time, a commit log with fences, outages and damage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from elastic_train.control.commands import Commit
from elastic_train.control.events import (
    CheckpointCommitted,
    Event,
    FencedOff,
    LogRead,
    PartWritten,
    SaveFailed,
)
from elastic_train.recovery.evidence import Stored
from elastic_train.testing.simulated_group import SimulatedGroup, SimulatedWorker
from elastic_train.testing.simulated_time import Clock

Say = Callable[[SimulatedWorker, Event], None]
Tell = Callable[[int, Event], None]
"""(term that asked, or 0 for the current controller; event)"""


@dataclass(slots=True)
class SimulatedStorage:
    """The newest fence wins: a commit of an older term is refused."""

    clock: Clock
    save_s: float
    fence: int = 0
    slots: int = 0
    kept: dict[int, Stored] = field(default_factory=dict[int, Stored])
    damaged: set[int] = field(default_factory=set[int])
    ever: bool = False
    down_until: float = 0.0
    busy_until: float = 0.0
    hangs_until: float = 0.0
    commits_lost: int = 0  # of those to come
    slow: float = 1.0  # times that writing takes, byte after byte
    writing: Counter[int] = field(default_factory=Counter[int])  # shares on their way, by generation
    stores: Callable[[str], bool] = lambda node: True  # whether a node reaches it

    @property
    def hangs_s(self) -> float:
        """For how much longer nothing is answered."""
        return max(self.hangs_until - self.clock.now, 0.0)

    @property
    def is_down(self) -> bool:
        return self.down_until > self.clock.now

    def journals(self, term: int) -> bool:
        """Whether a term's records still count: what a predecessor writes late is void."""
        return term >= self.fence

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
        before = self.newest()
        assert before is None or before.generation != stored.generation or before.step < stored.step, (
            "the newest record is that of the newest step"
        )
        self.kept[stored.slot] = stored
        self.ever = True
        return stored

    def order_prune(self, term: int, keep: tuple[int, ...]) -> None:
        """Prune after the commits that were ordered before, of which not all may be known yet."""
        self.busy_until = max(self.busy_until, self.clock.now)
        self.clock.after(self.busy_until - self.clock.now, lambda: self.prune(term, keep))

    def prune(self, term: int, keep: tuple[int, ...]) -> None:
        if term < self.fence:
            return
        known = max(keep, default=0)
        self.kept = {slot: stored for slot, stored in self.kept.items() if slot in keep or slot > known}
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

    def save(self, group: SimulatedGroup, say: Say) -> None:
        """Every rank writes its share of the group's state in its own time."""
        for rank, worker in enumerate(group.workers):
            seconds = self.save_s * self.slow * self.clock.draw.uniform(0.5, 1.5)
            self.writing[group.generation] += 1
            self.clock.after(
                seconds,
                lambda r=rank, w=worker, s=group.step, t=seconds: self._written(
                    group.generation, s, r, w, say, t
                ),
            )

    def writes(self, generation: int) -> bool:
        """Whether bytes of a generation are taken now."""
        return self.writing[generation] > 0 and not self.hangs_s

    def _written(
        self, generation: int, step: int, rank: int, worker: SimulatedWorker, say: Say, seconds: float
    ) -> None:
        self.writing[generation] -= 1
        self._write(generation, step, rank, worker, say, seconds)

    def order(self, term: int, command: Commit, tell: Tell) -> None:
        """Commit after a while, one after the other, and tell what came of it."""
        self.busy_until = max(self.busy_until, self.clock.now) + self.clock.draw.uniform(0.05, 1.0)
        self.clock.after(self.busy_until - self.clock.now, lambda: self._commit(term, command, tell))

    def read_log(self, term: int, tell: Tell) -> None:
        """Tell the newest record, after the commits that were ordered before."""
        self.busy_until = max(self.busy_until, self.clock.now) + self.clock.draw.uniform(0.05, 1.0)

        def read() -> None:
            if self.hangs_s:
                self.clock.after(self.hangs_s, read)
            elif self.is_down:
                tell(term, LogRead(at=0.0, problem="no answer"))
            else:
                tell(term, LogRead(at=0.0, stored=self.newest()))

        self.clock.after(self.busy_until - self.clock.now, read)

    def _write(
        self, generation: int, step: int, rank: int, worker: SimulatedWorker, say: Say, seconds: float
    ) -> None:
        if worker.died is not None:
            return
        if self.hangs_s:
            self.clock.after(self.hangs_s, lambda: self._write(generation, step, rank, worker, say, seconds))
            return
        if self.is_down or not self.stores(worker.node):
            say(worker, SaveFailed(at=0.0, generation=generation, step=step, problem="no answer"))
            return
        part = PartWritten(
            at=0.0,
            generation=generation,
            step=step,
            rank=rank,
            seconds=seconds,
            bytes=1,
            manifest=f"w{rank:05d}.parquet",
            digest="0",
        )
        say(worker, part)

    def _commit(self, term: int, command: Commit, tell: Tell) -> None:
        if self.hangs_s:
            self.clock.after(self.hangs_s, lambda: self._commit(term, command, tell))
            return
        if self.commits_lost:
            self.commits_lost -= 1
            if self.clock.draw.random() < 0.5:
                self.commit(term, command)
            return
        if self.is_down:
            problem = "the commit had no answer"
            failed = SaveFailed(at=0.0, generation=command.generation, step=command.step, problem=problem)
            tell(term, failed)
            return
        stored = self.commit(term, command)
        if stored is None:
            tell(term, FencedOff(at=0.0, by_term=self.fence))
        else:
            tell(term, CheckpointCommitted(at=0.0, stored=stored, metrics=command.metrics))
