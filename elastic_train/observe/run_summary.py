"""Summary of a run, folded from its journal one record at a time in bounded memory.

It is kept beside the state that covers old parts of the journal, and is bounded whatever a run's age.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from elastic_train.control.dataclass_json import plain, reader
from elastic_train.control.events import GroupReady, PeersHeld, StepCommitted
from elastic_train.observe.costs import Costs
from elastic_train.observe.goodput import GoodputAccount
from elastic_train.observe.journal_records import Record
from elastic_train.observe.ledger import LedgerEntry, entry_of
from elastic_train.observe.reconfigurations import Changes
from elastic_train.observe.run_progress import RunProgress, advance
from elastic_train.observe.run_totals import Figures
from elastic_train.observe.timeline import Timeline

HEAD = 12
"""Newest entries of the ledger that are kept whole."""
LOSSES = 1000
"""Steps whose loss is remembered."""


@dataclass(slots=True, kw_only=True)
class RunSummary:
    """`planned`, `formed`, `due` and `held` are the last records that said so; `held` by node."""

    progress: RunProgress = field(default_factory=RunProgress)
    changes: Changes = field(default_factory=Changes)
    account: GoodputAccount = field(default_factory=GoodputAccount)
    figures: Figures = field(default_factory=Figures)
    timeline: Timeline = field(default_factory=Timeline)
    costs: Costs = field(default_factory=Costs)
    losses: dict[int, float] = field(default_factory=dict[int, float])  # of the newest kept steps
    metrics: dict[str, float] = field(default_factory=dict[str, float])  # of the newest of them
    head: list[LedgerEntry] = field(default_factory=list[LedgerEntry])  # of the ledger, ascending
    last: Record | None = None
    planned: Record | None = None
    formed: Record | None = None
    due: Record | None = None
    held: dict[str, Record] = field(default_factory=dict[str, Record])

    @property
    def telling(self) -> tuple[Record, ...]:
        """The records that say why a run is as it is, in the order of the journal."""
        found = (self.planned, self.formed, self.due, *self.held.values(), self.last)
        return tuple(sorted((r for r in found if r is not None), key=lambda r: (r.wall, r.seq)))

    def add(self, record: Record) -> None:
        changes, generation, kept = self.changes, self.account.generation, self.account.newest
        self.progress = advance(self.progress, record)
        self.changes = changes.after(record)
        done = self.changes.done[-1] if self.changes.done is not changes.done else None
        self.account.add(record)
        new = isinstance(record.event, StepCommitted) and self.account.newest > kept
        self.figures.add(record, new=new, open_=changes.current, done=done)
        self.timeline.add(
            record,
            doing=self.account.doing,
            step=self.progress.step,
            new=new,
            done=done,
        )
        self.costs.add(record)
        self.last = record
        if record.planned:
            self.planned = record
        if record.formed is not None:
            self.formed = record
            self.held = {node: self.held[node] for node in record.formed.nodes if node in self.held}
        if record.cadence:
            self.due = record
        match record.event:
            case PeersHeld(node=node):
                self.held[node] = record
            case GroupReady() if self.account.generation != generation:
                self._go_back(self.account.newest)
            case StepCommitted() as event if event.generation == self.account.generation:
                self._step(event, record.seconds)
            case _:
                pass

    def _step(self, event: StepCommitted, wall: float) -> None:
        newest = max(self.losses, default=0)
        if event.step > newest:
            self.losses[event.step] = event.loss
            group = self.timeline.group
            self.head = [
                *self.head[1 - HEAD :],
                entry_of(event, group.plan if group is not None else "", wall),
            ]
            self.metrics = dict(event.metrics)
            if len(self.losses) > LOSSES:
                del self.losses[min(self.losses)]
        elif event.step == newest:
            self.metrics |= dict(event.metrics)

    def _go_back(self, step: int) -> None:
        self.losses = {number: loss for number, loss in self.losses.items() if number <= step}
        self.metrics = {}
        self.head = [entry for entry in self.head if entry.step <= step]


def summary_of(records: Iterable[Record], said: Mapping[str, Any] | None = None) -> RunSummary:
    """The fold of records, from what was `said` of those before. Raises KeyError, TypeError or ValueError for
    what this release does not know.
    """
    if said is not None and not {"figures", "timeline"} <= said.keys():
        raise KeyError("it has no figures and no timeline")  # of an earlier release: all is read
    summary = reader(RunSummary)(said) if said is not None else RunSummary()
    for record in records:
        summary.add(record)
    return summary


def encode_summary(summary: RunSummary) -> dict[str, Any]:
    """A summary as a dict that JSON can hold."""
    return plain(summary, named=True)
