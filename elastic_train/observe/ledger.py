"""The ledger: which generation committed each step, with what loss and which samples. Invariant: *each step
once*.

A generation that starts from an older step than the last one supersedes what lies beyond. Superseded entries
stay, as badput.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from elastic_train.control.events import GroupReady, StepCommitted
from elastic_train.observe.journal_records import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """One committed step."""

    step: int
    generation: int
    plan: str
    loss: float
    tokens: float
    grad_norm: float
    skipped: bool
    seconds: float
    wall: float
    ids_digest: int
    metrics: tuple[tuple[str, float], ...] = ()
    superseded_by: int | None = None  # the generation that ran the step again


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """`kept` has each step of the lineage once, ascending."""

    kept: tuple[LedgerEntry, ...] = ()
    superseded: tuple[LedgerEntry, ...] = ()

    @property
    def losses(self) -> dict[int, float]:
        return {entry.step: entry.loss for entry in self.kept}

    @property
    def executions(self) -> tuple[LedgerEntry, ...]:
        """Every execution of every step, in the order of time."""
        return tuple(sorted((*self.kept, *self.superseded), key=lambda e: (e.wall, e.step)))


def ledger(records: Iterable[Record]) -> Ledger:
    """The fold of a journal."""
    kept: dict[int, LedgerEntry] = {}
    superseded: list[LedgerEntry] = []
    plans: dict[int, str] = {}
    current = 0
    for record in records:
        if record.formed is not None:
            plans[record.formed.generation] = record.formed.plan
        match record.event:
            case GroupReady(generation=generation, step=step) if generation > current:
                current = generation
                for later in sorted(s for s in kept if s > step):
                    superseded.append(replace(kept.pop(later), superseded_by=generation))
            case StepCommitted() as event if event.generation == current and event.step not in kept:
                kept[event.step] = entry_of(event, plans.get(current, ""), record.seconds)
            case StepCommitted() as event if event.generation == current and event.metrics:
                reported = dict(kept[event.step].metrics) | dict(event.metrics)
                kept[event.step] = replace(kept[event.step], metrics=tuple(reported.items()))
            case _:
                pass
    return Ledger(kept=tuple(kept[step] for step in sorted(kept)), superseded=tuple(superseded))


def entry_of(event: StepCommitted, plan: str, wall: float) -> LedgerEntry:
    """The entry of a step that is kept."""
    return LedgerEntry(
        step=event.step,
        generation=event.generation,
        plan=plan,
        loss=event.loss,
        tokens=event.tokens,
        grad_norm=event.grad_norm,
        skipped=event.skipped,
        seconds=event.seconds,
        wall=wall,
        ids_digest=event.ids_digest,
        metrics=event.metrics,
    )
