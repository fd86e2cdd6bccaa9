"""Reconfigurations of a run: cause, plans before and after, duration, and steps lost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from elastic_train.control.changes import Change, ChangeKind
from elastic_train.control.events import GroupReady, StepCommitted
from elastic_train.observe.journal_records import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconfiguration:
    """From one group to the next. `seconds` ends with its first committed step, None before that.

    Where no step was left for it they end with the run.
    """

    kind: ChangeKind | None  # None: a journal of an earlier release
    cause: str  # in words
    graceful: bool  # a pause at a step boundary: a growth or a drain
    at: float  # wall seconds of the first sign
    step: int  # newest committed step then
    before: int  # workers of the old group
    after: int = 0  # of the new one
    generation: int = 0  # of the new group
    source: str = ""
    lost: int = 0  # committed steps that are run again
    seconds: float | None = None
    nodes: tuple[str, ...] = ()  # that it happened to
    workers: tuple[str, ...] = ()


LATEST = 1000
"""Changes that are remembered one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """The reconfigurations after the first group, folded one record at a time."""

    done: tuple[Reconfiguration, ...] = ()  # the latest, oldest first
    current: Reconfiguration | None = None
    workers: tuple[str, ...] = ()
    step: int = 0
    ready: bool = False
    began: bool = False  # whether the first group was up: what happens before is no change of it
    over: bool = False  # whether the run had ended, and is submitted again

    @property
    def all(self) -> tuple[Reconfiguration, ...]:
        return (*self.done, self.current) if self.current is not None else self.done

    def after(self, record: Record) -> Changes:
        """The changes after one more record."""
        done, current, workers = self.done, self.current, self.workers
        step, ready, began, over = self.step, self.ready, self.began, self.over
        event = record.event
        leaves = began and record.phase not in ("running", "ended")
        if leaves and (current is None or ready):
            if current is not None:
                done = (*done[1 - LATEST :], current)
            current, ready = _begin(record, workers, step, over=over), False
        elif current is not None and not ready:
            current = _name(current, record)
        if record.formed is not None:
            workers = record.formed.workers
            if current is not None:
                lost = max(current.step - record.formed.step, 0)
                current = replace(
                    current,
                    after=len(workers),
                    generation=record.formed.generation,
                    source=record.formed.source,
                    lost=max(lost, current.lost),
                )
        over = over or record.ended is not None
        if isinstance(event, GroupReady):
            step, ready, began, over = event.step, True, True, False
        elif isinstance(event, StepCommitted):
            step = max(step, event.step)
            if current is not None and not ready:  # told late, or on the way to a pause
                current = replace(current, step=max(current.step, event.step))
        if current is not None and ready and _in_use(record, current.generation):
            done = (*done[1 - LATEST :], replace(current, seconds=record.seconds - current.at))
            current, ready = None, False
        return Changes(
            done=done, current=current, workers=workers, step=step, ready=ready, began=began, over=over
        )


def history(records: Iterable[Record]) -> tuple[Reconfiguration, ...]:
    """Every reconfiguration after the first group, oldest first."""
    changes = Changes()
    for record in records:
        changes = changes.after(record)
    return changes.all


def table(reconfigurations: Sequence[Reconfiguration]) -> list[tuple[str, ...]]:
    """Rows of text, the header first."""
    header = ("cause", "at step", "workers", "from", "seconds", "steps lost")
    rows = [
        (
            r.cause,
            str(r.step),
            f"{r.before} -> {r.after or '?'}",
            r.source or "?",
            "?" if r.seconds is None else f"{r.seconds:.1f}",
            str(r.lost),
        )
        for r in reconfigurations
    ]
    return [header, *rows]


def _in_use(record: Record, generation: int) -> bool:
    event = record.event
    finished = record.ended is not None and record.ended[0] == "finished"
    return finished or (isinstance(event, StepCommitted) and event.generation == generation)


def _begin(record: Record, workers: Sequence[str], step: int, *, over: bool) -> Reconfiguration:
    change = record.change
    return Reconfiguration(
        kind="resubmission" if over else change.kind if change is not None else None,
        cause="submitted again" if over else _words(change) if change is not None else record.reason,
        graceful=record.phase == "pausing",
        at=record.seconds,
        step=step,
        before=len(workers),
        nodes=change.nodes if change is not None else (),
        workers=change.workers if change is not None else (),
    )


def _name(current: Reconfiguration, record: Record) -> Reconfiguration:
    """The first cause that is not a broken collective replaces one that is."""
    change = record.change
    if current.kind != "collective" or change is None or not (change.cause or change.kind == "node_lost"):
        return current
    if change.kind == "collective":
        return current
    return replace(
        current, kind=change.kind, cause=_words(change), nodes=change.nodes, workers=change.workers
    )


def _words(change: Change) -> str:
    who = change.workers[0] if change.workers else ""
    match change.kind:
        case "growth" | "shrink" | "rebalance" | "drain" | "stop":
            return change.kind
        case "eviction":
            return f"eviction of {', '.join(change.nodes)}"
        case "node_lost":
            return "loss of a node"
        case "takeover":
            return "a new controller"
        case "out_of_memory":
            return f"{who} out of memory"
        case "hang" if not who:
            return f"hang at step {change.step}"
        case "worker_lost" if change.cause is None:
            return f"death of {who}, found by a new controller"
        case "worker_lost" | "silence" | "hang":
            return f"{change.cause} of {who}"
        case _:
            return f"{change.cause} error on {who}" if change.cause else change.kind.replace("_", " ")
