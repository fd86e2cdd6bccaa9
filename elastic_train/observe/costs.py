"""What steps and switches of a run took, beside what they were expected to take before."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from elastic_train.control.events import StepCommitted
from elastic_train.observe.journal_records import FormedGroup, Record

KINDS = 16
"""Kinds of plans that are remembered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The mean of `steps` under one mesh, the first of each group left out: seconds. `expected_s` is what was
    expected of the newest group.
    """

    steps: int = 0
    mean_s: float = 0.0
    expected_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchCost:
    """Seconds that training stood still in a switch, beside the step that was done meanwhile."""

    took_s: float
    expected_s: float


@dataclass(slots=True, kw_only=True)
class Costs:
    """Folded one record at a time, bounded whatever a run's age."""

    paces: dict[str, Pace] = field(default_factory=dict[str, Pace])  # by mesh, the newest last
    switch: SwitchCost | None = None  # the last one
    group: FormedGroup | None = None
    committed: float | None = None  # wall seconds of the newest step
    step_s: float = 0.0  # that it took
    known: int = 0  # the newest step

    def add(self, record: Record) -> None:
        if record.formed is not None:
            self.group = record.formed
            self.known = min(self.known, record.formed.step)
        event, group = record.event, self.group
        if not isinstance(event, StepCommitted) or group is None or event.generation != group.generation:
            return
        if event.step <= self.known:  # told once more
            return
        if event.step > group.step + 1:
            self._pace(group, event.seconds)
        elif group.switch_s is not None and self.committed is not None:
            stood = record.seconds - self.committed
            self.switch = SwitchCost(took_s=max(stood - self.step_s, 0.0), expected_s=group.switch_s)
        self.committed, self.step_s, self.known = record.seconds, event.seconds, event.step

    def _pace(self, group: FormedGroup, seconds: float) -> None:
        before = self.paces.pop(group.mesh, Pace())
        steps = before.steps + 1
        mean = before.mean_s + (seconds - before.mean_s) / steps
        if len(self.paces) == KINDS:
            del self.paces[next(iter(self.paces))]
        self.paces[group.mesh] = replace(before, steps=steps, mean_s=mean, expected_s=group.step_s)

    @property
    def words(self) -> str:
        """A line of text; empty before anything was measured."""
        said: list[str] = []
        if self.group is not None and (pace := self.paces.get(self.group.mesh)) is not None:
            expected = "" if pace.expected_s is None else f", {pace.expected_s:.2g} s were expected"
            said.append(f"steps of {self.group.mesh} take {pace.mean_s:.2g} s{expected}")
        if self.switch is not None:
            took, expected_s = self.switch.took_s, self.switch.expected_s
            said.append(
                f"the last switch took {took:.2g} s beside its step, {expected_s:.2g} s were expected"
            )
        return "; ".join(said)
