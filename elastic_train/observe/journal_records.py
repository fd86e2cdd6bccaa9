"""Journal records: an event, the controller's reason and its outcome, as one line of JSON.

Folds of records need neither the policy nor the planner: what a person wants to know of the decision is in
the record. Durations are taken from the wall time of the records, because a new term's clock starts anew;
within a term it goes on evenly, whatever is done to the machine's clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from elastic_train.control.changes import Change
from elastic_train.control.commands import End, Form
from elastic_train.control.dataclass_json import plain as plain_of
from elastic_train.control.dataclass_json import reader
from elastic_train.control.events import Event
from elastic_train.control.journal_codec import decode, encode
from elastic_train.control.states import Outcome
from elastic_train.planner.plan import on_nodes
from elastic_train.recovery.evidence import Fresh, FromStorage, Live, Mixed

Source = Literal["fresh", "live", "mixed", "replay", "storage"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FormedGroup:
    """The group that a record ordered to be formed."""

    generation: int
    step: int
    source: Source
    mesh: str
    dp: int
    workers: tuple[str, ...]
    nodes: tuple[str, ...]  # by rank
    groups: tuple[tuple[int, int], ...] = ()  # of stages that log nothing between them
    step_s: float | None = None  # that a step was expected to take
    switch_s: float | None = None  # that the switch was expected to take beside its step

    @property
    def plan(self) -> str:
        return f"{self.mesh} {on_nodes(len(set(self.nodes)))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """`phase` is the phase after the event; `commands` names what was ordered; `planned` says why the group's
    plan was taken or kept, `cadence` why a checkpoint was due. `change` is what happened to the run, as a
    value.
    """

    seq: int
    wall: str  # UTC, ISO 8601
    event: Event
    reason: str
    phase: str
    planned: str = ""
    cadence: str = ""
    change: Change | None = None
    commands: tuple[str, ...] = ()
    formed: FormedGroup | None = None
    ended: tuple[str, str] | None = None  # outcome, detail

    @property
    def entry(self) -> str:
        """The anchor of docs/errors.md that says what to do about it; empty for the usual course."""
        if self.ended is not None and self.ended[0] != "finished":
            return f"ended-{self.ended[0]}"
        if self.change is not None and self.change.cause is not None:
            return f"cause-{self.change.cause}"
        return ""

    @property
    def seconds(self) -> float:
        """Wall time as seconds since the epoch."""
        return datetime.fromisoformat(self.wall).timestamp()


def wall_text(seconds: float) -> str:
    """Seconds since the epoch as the text that records carry."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def record(seq: int, wall: str, event: Event, outcome: Outcome) -> Record:
    """What is journalled of one transition."""
    form = next((c for c in outcome.commands if isinstance(c, Form)), None)
    end = next((c for c in outcome.commands if isinstance(c, End)), None)
    return Record(
        seq=seq,
        wall=wall,
        event=event,
        reason=outcome.reason,
        phase=type(outcome.state.phase).__name__.lower(),
        planned=outcome.planned,
        cadence=outcome.cadence,
        change=outcome.change,
        commands=tuple(type(c).__name__ for c in outcome.commands),
        formed=_formed(form) if form is not None else None,
        ended=(end.outcome, end.detail) if end is not None else None,
    )


def planning(records: Sequence[Record]) -> str:
    """Why a run is on its plan, as the planner said it last; empty before the first group."""
    return next((record.planned for record in reversed(records) if record.planned), "")


def to_json(line: Record) -> dict[str, Any]:
    """A record as a dict that JSON can hold; what is empty is left out."""
    plain = {
        "seq": line.seq,
        "wall": line.wall,
        "event": encode(line.event),
        "reason": line.reason,
        "phase": line.phase,
        "planned": line.planned or None,
        "cadence": line.cadence or None,
        "change": plain_of(line.change) if line.change is not None else None,
        "commands": list(line.commands),
        "formed": asdict(line.formed) if line.formed is not None else None,
        "ended": list(line.ended) if line.ended is not None else None,
    }
    return {name: value for name, value in plain.items() if value not in (None, [])}


def from_json(plain: Mapping[str, Any]) -> Record:
    """The record that was written. Raises KeyError for an event that this release does not know."""
    ended = plain.get("ended")
    return Record(
        seq=plain["seq"],
        wall=plain["wall"],
        event=decode(plain["event"]),
        reason=plain["reason"],
        phase=plain["phase"],
        planned=plain.get("planned", ""),
        cadence=plain.get("cadence", ""),
        change=reader(Change)(plain["change"]) if "change" in plain else None,
        commands=tuple(plain.get("commands", ())),
        formed=_formed_from_json(plain["formed"]) if "formed" in plain else None,
        ended=(ended[0], ended[1]) if ended else None,
    )


def _formed_from_json(plain: Mapping[str, Any]) -> FormedGroup:
    return FormedGroup(
        generation=plain["generation"],
        step=plain["step"],
        source=plain["source"],
        mesh=plain["mesh"],
        dp=plain["dp"],
        workers=tuple(plain["workers"]),
        nodes=tuple(plain["nodes"]),
        groups=tuple((start, stop) for start, stop in plain.get("groups", ())),
        step_s=plain.get("step_s"),
        switch_s=plain.get("switch_s"),
    )


def _formed(form: Form) -> FormedGroup:
    match form.origin:
        case Fresh():
            source, step = "fresh", 0
        case Live(step=step):
            source = "live"
        case Mixed(step=step, replays=replays):
            source = "replay" if replays else "mixed"
        case FromStorage(stored=stored):
            source, step = "storage", stored.step
    mesh = form.plan.mesh
    return FormedGroup(
        generation=form.generation,
        step=step,
        source=source,
        mesh=str(mesh),
        dp=mesh.dp,
        workers=form.plan.workers,
        nodes=form.plan.nodes,
        groups=form.plan.groups,
        step_s=form.step_s,
        switch_s=form.switch_s,
    )
