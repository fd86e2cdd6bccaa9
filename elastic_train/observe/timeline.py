"""Timeline of a run for the page and the report: activity, nodes, events and curves.

One fold over the journal, bounded whatever a run's age: the oldest happenings and the nodes that went first
are given up one by one, short neighbours of the same band are merged.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from elastic_train.control.events import (
    CheckpointCommitted,
    JournalDurable,
    Node,
    NodesChanged,
    PartWritten,
    PeersHeld,
    StepCommitted,
)
from elastic_train.observe.bounded_series import Series
from elastic_train.observe.event_text import clause, outcome_of, storage_back
from elastic_train.observe.journal_records import FormedGroup, Record
from elastic_train.observe.reconfigurations import Reconfiguration

SPANS, LANES, STRETCHES, HAPPENINGS = 600, 160, 60, 400
BREAKS = ("collective", "node_lost", "worker_lost", "silence", "hang", "out_of_memory", "corruption")
MINOR = ("saved", "skipped", "began")
"""Kinds of happenings that aren't said one by one."""
OPEN = -1.0
"""The end of what still lasts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivitySpan:
    """What the run did, and on which plan. `doing` is training or a cause of badput."""

    began: float
    ended: float
    doing: str
    generation: int = 0
    workers: int = 0
    nodes: int = 0
    plan: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    began: float
    ended: float
    status: str  # training, standby, leaving


@dataclass(slots=True, kw_only=True)
class NodeLane:
    """One node."""

    node: str
    stretches: list[Stretch] = field(default_factory=list[Stretch])

    def put(self, seconds: float, status: str) -> None:
        """From now on; "" is gone."""
        last = self.stretches[-1] if self.stretches else None
        if last is not None and last.ended == OPEN:
            if last.status == status:
                return
            self.stretches[-1] = replace(last, ended=seconds)
        if status:
            self.stretches.append(Stretch(began=seconds, ended=OPEN, status=status))
            del self.stretches[:-STRETCHES]

    @property
    def there(self) -> bool:
        return bool(self.stretches) and self.stretches[-1].ended == OPEN


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """Something worth a line: one clause, and the controller's whole reason. A reconfiguration that is over
    says what it cost.
    """

    number: int
    at: float
    kind: str
    step: int
    clause: str
    reason: str
    entry: str = ""  # of docs/errors.md
    nodes: tuple[str, ...] = ()
    seconds: float | None = None
    lost: int = 0


@dataclass(slots=True, kw_only=True)
class Timeline:
    """Wall seconds since the epoch."""

    began: float = 0.0
    now: float = 0.0
    spans: list[ActivitySpan] = field(default_factory=list[ActivitySpan])  # the last one lasts
    lanes: list[NodeLane] = field(default_factory=list[NodeLane])  # by when the node was first there
    given_up: int = 0  # lanes
    happenings: list[Happening] = field(default_factory=list[Happening])
    count: int = 0  # of happenings, ever
    trouble: list[tuple[float, float, str]] = field(default_factory=list[tuple[float, float, str]])
    loss: Series = field(default_factory=Series)
    tokens_per_s: Series = field(default_factory=Series)
    rate: Series = field(default_factory=Series)
    saves: Series = field(default_factory=Series)  # bytes of each checkpoint
    snapshots: Series = field(default_factory=Series)  # bytes held in peer memory, as said from time to time
    group: FormedGroup | None = None
    present: tuple[Node, ...] = ()
    bytes_: dict[int, int] = field(default_factory=dict[int, int])  # of checkpoints that are being written

    def add(self, record: Record, *, doing: str, step: int, new: bool, done: Reconfiguration | None) -> None:
        """`doing` instead of training, at `step`; `done` is a reconfiguration that the record ended.
        `new`: it is the first that tells of an execution of a step.
        """
        seconds = record.seconds
        if not self.spans:
            self.began = seconds
        self.now = seconds
        self._tell(record, step)
        if done is not None:
            self._cost(done, seconds)
        match record.event:
            case NodesChanged(nodes=nodes):
                self.present = nodes
                self._place(seconds)
            case StepCommitted() as event if new:
                self._curves(event, seconds)
            case PartWritten() as event:
                self.bytes_[event.step] = self.bytes_.get(event.step, 0) + event.bytes
            case CheckpointCommitted(stored=stored):
                self.saves.add(seconds, stored.step, float(self.bytes_.pop(stored.step, 0)))
                self.bytes_ = {later: size for later, size in self.bytes_.items() if later > stored.step}
                self._storage_back(seconds, stored.step)
            case JournalDurable():
                self._storage_back(seconds, step)
            case PeersHeld() as event:
                self.snapshots.add(seconds, event.step, float(event.own))
            case _:
                pass
        if record.formed is not None:
            self.group = record.formed
            self._place(seconds)
        if record.ended is not None:
            self.group, self.present = None, ()
            self._place(seconds)
            self._untroubled(seconds)
        self._span(doing or "training", seconds)

    # -- curves and bands

    def _curves(self, event: StepCommitted, seconds: float) -> None:
        self.loss.add(seconds, event.step, event.loss)
        if event.seconds > 0:
            self.tokens_per_s.add(seconds, event.step, event.tokens / event.seconds)
        if event.rates:
            self.rate.add(seconds, event.step, event.rates[0])

    def _span(self, doing: str, seconds: float) -> None:
        group = self.group
        generation = group.generation if group is not None else 0
        last = self.spans[-1] if self.spans else None
        if last is not None:
            self.spans[-1] = last = replace(last, ended=seconds)
        if last is None or (last.doing, last.generation) != (doing, generation):
            self.spans.append(
                ActivitySpan(
                    began=seconds,
                    ended=seconds,
                    doing=doing,
                    generation=generation,
                    workers=len(group.workers) if group is not None else 0,
                    nodes=len(set(group.nodes)) if group is not None else 0,
                    plan=group.mesh if group is not None else "",
                )
            )
            if len(self.spans) > SPANS:
                self._merge()

    def _merge(self) -> None:
        """The two neighbours that together are shortest become one, which says what the longer one did."""
        pairs = zip(self.spans, self.spans[1:-1], strict=False)
        _, place = min((b.ended - a.began, n) for n, (a, b) in enumerate(pairs))
        a, b = self.spans[place : place + 2]
        longer = a if a.ended - a.began > b.ended - b.began else b
        self.spans[place : place + 2] = [replace(longer, began=a.began, ended=b.ended)]

    def _place(self, seconds: float) -> None:
        """Where each node stands now."""
        members = frozenset(self.group.nodes) if self.group is not None else frozenset[str]()
        there = {
            n.name: "leaving" if n.drain_by is not None else "training" if n.name in members else "standby"
            for n in self.present
        }
        known = {lane.node: lane for lane in self.lanes}
        for name in there:
            if name not in known:
                known[name] = NodeLane(node=name)
                self.lanes.append(known[name])
        for lane in self.lanes:
            lane.put(seconds, there.get(lane.node, ""))
        while len(self.lanes) > LANES:
            gone = [lane for lane in self.lanes if not lane.there] or self.lanes
            self.lanes.remove(min(gone, key=lambda lane: lane.stretches[-1].ended if lane.stretches else 0.0))
            self.given_up += 1

    # -- what happened

    def _tell(self, record: Record, step: int) -> None:
        told = clause(record, self.present, step)
        if told is None:
            return
        kind, text, nodes = told
        if kind == "collective" and self._broken:
            return  # how the others feel what was told before
        if kind == "storage_trouble":
            if self.troubled is not None:
                return  # it was told when it began
            self.trouble.append((record.seconds, OPEN, record.reason))
            del self.trouble[:-HAPPENINGS]
        self._put(record.seconds, kind, step, text, record.reason, nodes, entry=record.entry)

    @property
    def _broken(self) -> bool:
        """Whether somebody's end was told since the last group."""
        for happening in reversed(self.happenings):
            if happening.kind == "formed" or happening.kind.endswith("_over"):
                return False
            if happening.kind in BREAKS:
                return True
        return False

    def _cost(self, done: Reconfiguration, seconds: float) -> None:
        kind, text = outcome_of(done)
        self._put(seconds, kind, done.step, text, "", done.nodes, done)

    def _put(
        self,
        at: float,
        kind: str,
        step: int,
        text: str,
        reason: str,
        nodes: tuple[str, ...],
        done: Reconfiguration | None = None,
        *,
        entry: str = "",
    ) -> None:
        self.count += 1
        self.happenings.append(
            Happening(
                number=self.count,
                at=at,
                kind=kind,
                step=step,
                clause=text,
                reason=reason,
                entry=entry,
                nodes=nodes,
                seconds=done.seconds if done is not None else None,
                lost=done.lost if done is not None else 0,
            )
        )
        del self.happenings[:-HAPPENINGS]

    @property
    def troubled(self) -> tuple[float, str] | None:
        """Since when storage fails, and why; None where it doesn't."""
        began, ended, why = self.trouble[-1] if self.trouble else (0.0, 0.0, "")
        return (began, why) if ended == OPEN else None

    def _storage_back(self, seconds: float, step: int) -> None:
        if (began := self._untroubled(seconds)) is not None:
            self._put(seconds, "storage_back", step, storage_back(seconds - began), "", ())

    def _untroubled(self, seconds: float) -> float | None:
        """The trouble is over; when it began."""
        if self.troubled is None:
            return None
        began, why = self.troubled
        self.trouble[-1] = (began, seconds, why)
        return began

    def since(self, number: int) -> list[Happening]:
        """What happened after the happening of this number, oldest first."""
        return [happening for happening in self.happenings if happening.number > number]
