"""Totals of a run's faults, steps and saves: one fold over its journal, of bounded size.

An interruption is a reconfiguration that nobody asked for. Its recovery is divided by what the run was doing:
`settle` until the final reports, `wait` for enough workers, `form` until every rank holds its state,
`first step` until that is of use. The stall of a save is what the steps after its snapshot took longer than
the median step, until it was committed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from elastic_train.control.events import (
    CheckpointCommitted,
    GroupReady,
    PartWritten,
    PeersHeld,
    SaveFailed,
    StepCommitted,
)
from elastic_train.observe.duration_quantiles import Durations
from elastic_train.observe.journal_records import Record
from elastic_train.observe.reconfigurations import Reconfiguration

RECENT = 256
"""Steps whose seconds are remembered one by one, for the stall of a save."""
PHASES = {"settling": "settle", "waiting": "wait", "forming": "form", "running": "first step"}


@dataclass(slots=True, kw_only=True)
class Figures:
    """Counts, seconds and bytes since the run was first submitted."""

    executions: int = 0  # of steps
    skipped: int = 0
    tokens: float = 0.0
    lost: int = 0  # committed steps that a group had to run again
    restarts: dict[str, int] = field(default_factory=dict[str, int])  # by the kind of change
    interruptions: int = 0
    recovered: int = 0  # of these, those after which a step was committed
    recovery: dict[str, float] = field(default_factory=dict[str, float])  # seconds by phase
    graceful_s: float = 0.0  # of switches that were asked for
    step_times: Durations = field(default_factory=Durations)
    checkpoints: int = 0
    failed_saves: int = 0
    written: int = 0  # bytes of checkpoints
    write_s: Durations = field(default_factory=Durations)  # of the slowest rank
    stall_s: float = 0.0  # by which saves made steps longer
    near_bytes: int = 0  # restored from the own node's memory
    far_bytes: int = 0  # and from other nodes'
    held: dict[str, tuple[int, int, int, int]] = field(
        default_factory=dict[str, tuple[int, int, int, int]]
    )  # by node: the step of its snapshots, bytes of its own, of copies, spilled
    rates: tuple[float, ...] = ()
    recent: dict[int, float] = field(default_factory=dict[int, float])  # seconds of the newest steps
    parts: dict[int, float] = field(default_factory=dict[int, float])  # seconds of writes that are open
    phase: str = ""
    since: float = 0.0

    def add(
        self, record: Record, *, new: bool, open_: Reconfiguration | None, done: Reconfiguration | None
    ) -> None:
        """`open_` is the reconfiguration that was under way before this record, `done` the one it ended.
        `new`: it is the first that tells of an execution of a step.
        """
        self._time(record, open_)
        if done is not None:
            self._changed(done)
        match record.event:
            case StepCommitted() as event if new:
                self._step(event)
            case GroupReady() as event:
                self.near_bytes += event.near_bytes
                self.far_bytes += event.far_bytes
            case PartWritten() as event:
                self.written += event.bytes
                self.parts[event.step] = max(self.parts.get(event.step, 0.0), event.seconds)
            case CheckpointCommitted() as event:
                self._saved(event.stored.step)
            case SaveFailed():
                self.failed_saves += 1
            case PeersHeld() as event:
                self.held[event.node] = (event.step, event.own, event.copies, event.spilled)
            case _:
                pass
        if record.formed is not None:
            self.held = {node: self.held[node] for node in record.formed.nodes if node in self.held}

    def _time(self, record: Record, open_: Reconfiguration | None) -> None:
        seconds = record.seconds
        name = PHASES.get(self.phase)
        if open_ is not None and not open_.graceful and name is not None:
            self.recovery[name] = self.recovery.get(name, 0.0) + max(0.0, seconds - self.since)
        self.phase, self.since = record.phase, seconds

    def _changed(self, done: Reconfiguration) -> None:
        kind = done.kind or "unknown"
        self.restarts[kind] = self.restarts.get(kind, 0) + 1
        self.lost += done.lost
        if not done.graceful and kind != "resubmission":
            self.interruptions += 1
            self.recovered += done.seconds is not None
        elif done.graceful:
            self.graceful_s += done.seconds or 0.0

    def _step(self, event: StepCommitted) -> None:
        self.executions += 1
        self.skipped += event.skipped
        self.tokens += event.tokens
        self.step_times.add(event.seconds)
        self.recent.pop(event.step, None)
        self.recent[event.step] = event.seconds
        self.rates = event.rates or self.rates
        if len(self.recent) > RECENT:
            del self.recent[next(iter(self.recent))]

    def _saved(self, step: int) -> None:
        self.checkpoints += 1
        self.write_s.add(self.parts.pop(step, 0.0))
        self.parts = {later: seconds for later, seconds in self.parts.items() if later > step}
        usual = self.step_times.quantile(0.5) or 0.0
        self.stall_s += sum(max(0.0, s - usual) for number, s in self.recent.items() if number > step)

    @property
    def mttr_s(self) -> dict[str, float]:
        """Mean seconds of a recovery, by phase."""
        return {
            name: spent / self.interruptions for name, spent in self.recovery.items() if self.interruptions
        }

    def held_bytes(self) -> Counter[str]:
        """What peer memory holds now, by kind."""
        kinds = ("own", "copies", "spilled")
        return Counter({k: sum(h[1 + n] for h in self.held.values()) for n, k in enumerate(kinds)})
