"""Goodput: the share of wall time, from submission to end, spent on steps that were kept.

A step counts once, with the seconds of its first execution; running it again is badput. The rest of the wall
time is given to what the run was doing then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastic_train.observe.ledger import ledger
from elastic_train.observe.records import Record


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
    if not records:
        return Goodput(wall_s=0.0, good_s=0.0, badput=())
    start = records[0].seconds if submitted is None else submitted
    end = records[-1].seconds
    book = ledger(records)
    kept = {entry.step for entry in book.kept}
    first: dict[int, float] = {}
    again = 0.0
    for entry in book.executions:
        if entry.step in kept and entry.step not in first:
            first[entry.step] = entry.seconds
        else:
            again += entry.seconds
    good = sum(first.values())
    idle = _idle(records, start, end)
    between = end - start - sum(idle.values()) - good - again
    if between < 0.0:  # a step was told of after its group broke: it is no recovery
        idle["recovery"] += between
    causes = {**idle, "steps run again": again, "between steps": between}
    return Goodput(
        wall_s=end - start,
        good_s=good,
        badput=tuple((cause, seconds) for cause, seconds in causes.items() if seconds > 0.0),
    )


def _idle(records: Sequence[Record], start: float, end: float) -> dict[str, float]:
    """Seconds in which no group trained, by what was done instead."""
    spent = {"start": 0.0, "recovery": 0.0, "switch": 0.0, "not running": 0.0}
    since, doing = start, "start"
    for record in records:
        trains = record.phase == "running"
        if doing and trains:
            spent[doing] += record.seconds - since
            doing = ""
        elif record.phase == "ended":
            if doing:
                spent[doing] += record.seconds - since
            since, doing = record.seconds, "not running"
        elif doing == "not running" and not trains:
            spent[doing] += record.seconds - since
            since, doing = record.seconds, "start"
        elif not doing and not trains:
            since, doing = record.seconds, "switch" if record.phase == "pausing" else "recovery"
        elif doing == "switch" and record.phase == "settling":
            doing = "recovery"
    if doing:
        spent[doing] += end - since
    return spent
