"""Goodput: the share of wall time, from submission to end, spent on steps that were kept.

A step counts once, with the seconds of its first execution; running it again is badput. The rest of the wall
time is given to what the run was doing then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from elastic_train.control.events import GroupReady, StepCommitted
from elastic_train.observe.journal_records import Record

RECENT = 4096
"""Steps whose first execution is remembered by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Seconds; `badput` by cause sums up with `good_s` to `wall_s`."""

    wall_s: float
    good_s: float
    badput: tuple[tuple[str, float], ...]

    @property
    def share(self) -> float:
        return self.good_s / self.wall_s if self.wall_s > 0 else 0.0


def words(account: Goodput) -> str:
    """The account in one line of text."""
    rest = ", ".join(f"{cause} {seconds:.1f} s" for cause, seconds in account.badput)
    good = (
        f"goodput {account.share:.0%}: {account.good_s:.1f} of {account.wall_s:.1f} s on steps that were kept"
    )
    return f"{good}; {rest}" if rest else good


def goodput(records: Sequence[Record], *, submitted: float | None = None) -> Goodput:
    """The account of a run that was `submitted` at these wall seconds, by default at its first record."""
    account = GoodputAccount()
    for record in records:
        account.add(record)
    return account.told(submitted=submitted)


@dataclass(slots=True, kw_only=True)
class GoodputAccount:
    """What became of the time, folded one record at a time. Steps that are run again after more than
    `RECENT` others are taken at the mean.
    """

    start: float | None = None
    end: float = 0.0
    spent: dict[str, float] = field(
        default_factory=lambda: {"start": 0.0, "recovery": 0.0, "switch": 0.0, "not running": 0.0}
    )
    since: float = 0.0
    doing: str = "start"  # instead of training
    generation: int = 0
    newest: int = 0  # step that is kept
    good_s: float = 0.0  # of first executions of kept steps
    again_s: float = 0.0  # of all other executions
    first: dict[int, float] = field(default_factory=dict[int, float])  # executions of recent steps

    def add(self, record: Record) -> None:
        seconds = record.seconds
        if self.start is None:
            self.start = self.since = seconds
        self.end = seconds
        self._idle(record.phase, seconds)
        match record.event:
            case GroupReady(generation=generation, step=step) if generation > self.generation:
                self.generation = generation
                self._go_back(step)
            case StepCommitted() as event if event.generation == self.generation and event.step > self.newest:
                self._step(event.step, event.seconds)
            case _:
                pass

    def told(self, *, submitted: float | None = None) -> Goodput:
        """The account so far."""
        if self.start is None:
            return Goodput(wall_s=0.0, good_s=0.0, badput=())
        start = self.start if submitted is None else submitted
        idle = dict(self.spent)
        idle["start"] += self.start - start
        if self.doing:
            idle[self.doing] += self.end - self.since
        between = self.end - start - sum(idle.values()) - self.good_s - self.again_s
        if between < 0.0:  # a step was told of after its group broke: it is no recovery
            idle["recovery"] += between
        causes = {**idle, "steps run again": self.again_s, "between steps": between}
        return Goodput(
            wall_s=self.end - start,
            good_s=self.good_s,
            badput=tuple((cause, spent) for cause, spent in causes.items() if spent > 0.0),
        )

    def _step(self, step: int, seconds: float) -> None:
        self.newest = step
        known = self.first.get(step)
        if known is None:
            self.first[step] = known = seconds
            if len(self.first) > 2 * RECENT:
                self.first = {number: self.first[number] for number in sorted(self.first)[-RECENT:]}
        else:
            self.again_s += seconds - known
        self.good_s += known

    def _go_back(self, step: int) -> None:
        """Steps beyond are not kept."""
        mean = self.good_s / self.newest if self.newest else 0.0
        gone = [self.first.get(number, mean) for number in range(step + 1, self.newest + 1)]
        self.good_s -= sum(gone)
        self.again_s += sum(gone)
        self.newest = step

    def _idle(self, phase: str, seconds: float) -> None:
        """Seconds in which no group trained, by what was done instead."""
        trains = phase == "running"
        if self.doing and trains:
            self.spent[self.doing] += seconds - self.since
            self.doing = ""
        elif phase == "ended":
            if self.doing:
                self.spent[self.doing] += seconds - self.since
            self.since, self.doing = seconds, "not running"
        elif self.doing == "not running" and not trains:
            self.spent[self.doing] += seconds - self.since
            self.since, self.doing = seconds, "start"
        elif not self.doing and not trains:
            self.since, self.doing = seconds, "switch" if phase == "pausing" else "recovery"
        elif self.doing == "switch" and phase == "settling":
            self.doing = "recovery"
