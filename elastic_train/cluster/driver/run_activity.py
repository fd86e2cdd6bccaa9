"""Describe what a run does while it does not train, and its progress, from heartbeats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastic_train.cluster.messages import Heartbeat
from elastic_train.observe.run_summary import RunSummary
from elastic_train.planner.plan import counted
from elastic_train.show.scale import duration, number


@dataclass(frozen=True, slots=True)
class Doing:
    """`done` of `whole` bytes of state have come; 0 of 0 where bytes say nothing."""

    words: str
    done: int = 0
    whole: int = 0

    @property
    def amount(self) -> str:
        return f"{number(self.done)}B of {number(self.whole)}B" if self.whole else ""

    def __str__(self) -> str:
        return f"{self.words}: {self.amount}" if self.whole else self.words


def doing(told: RunSummary, heartbeats: Sequence[Heartbeat], *, least: int) -> Doing | None:
    """None while it trains and once it ended; `least` workers make a group."""
    match told.progress.phase:
        case "waiting":
            return Doing(f"workers up: {len(heartbeats)}, needed: {least}")
        case "settling":
            return Doing("asking the survivors what they hold")
        case "pausing":
            return Doing("the group stops at the end of a step")
        case "forming":
            return _forming(told, heartbeats)
        case _:
            return None


def storage_failing(told: RunSummary) -> str:
    """For how long storage has been in trouble, as far as the journal goes; empty where it isn't."""
    troubled = told.timeline.troubled
    return "" if troubled is None else f"storage failing for {duration(told.timeline.now - troubled[0])}"


def _forming(told: RunSummary, heartbeats: Sequence[Heartbeat]) -> Doing:
    replaying = [beat.step for beat in heartbeats if beat.phase == "replay"]
    if replaying:
        return Doing(f"replaying a lost stage: step {min(replaying)}, until step {told.progress.step}")
    members = [beat for beat in heartbeats if beat.generation == told.progress.generation]
    whole = sum(beat.needed_bytes for beat in members)
    if not whole:
        inside = sum(beat.user_code for beat in members)
        busy = f": the job's own code runs on {inside} of {counted(len(members), 'worker')}" if inside else ""
        return Doing(f"building the group{busy}")
    done = sum(beat.filled_bytes for beat in members)
    return Doing("taking the state" if done < whole else "comparing the state", done, whole)
