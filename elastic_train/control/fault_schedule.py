"""Fault schedules for fault injection, the same for the simulator and for a real cluster.

A fault happens at a moment: when a rank is at a phase of a step. Nodes are named by labels that whoever
performs the schedule maps to machines.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

At = Literal[
    "forward",
    "backward",
    "update",
    "reduce",
    "vote",
    "optimizer",
    "evaluation",
    "save",
    "forming",
    "filling",
    "replay",
    "preparing",
]
SOME = ("update", "evaluation", "filling", "replay", "preparing")
PHASES: tuple[At, ...] = tuple(phase for phase in get_args(At) if phase not in SOME)
"""Those of every run."""

PREPARING = (
    "asked",
    "listening",
    "announced",
    "met",
    "connected",
    "axes connected",
    "entered",
    "taken up",
    "data",
    "warmed up",
    "built",
    "ready",
    "swapping",
    "swapped",
)
"""Points of a preparation in a worker. Only newcomers come by those from "entered" to "built"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The first time that somebody is at `phase` of the step which leads to `step`.

    In forward, backward and update `micro_batch` counts the rank's own; `forming` is the group that starts
    from `step - 1` or later, and `filling` its first step, where newcomers get their state meanwhile; in
    replay a step is run again. `preparing` is the group that is made ready beside another one, at that step
    or later; `micro_batch` is the point of it (`PREPARING`), and ranks are those of the next group.
    """

    step: int
    phase: At = "forward"
    micro_batch: int = 0

    def meets(self, step: int) -> bool:
        """Whether somebody who is at the phase of this step is at the moment."""
        return self.step <= step if self.phase in ("forming", "filling", "preparing") else self.step == step

    def __str__(self) -> str:
        return f"{self.phase} of step {self.step}"


@dataclass(frozen=True, slots=True, kw_only=True)
class KillNode:
    """A machine and everything on it ends without a word."""

    when: Moment
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KillRank:
    """One worker process ends (SIGKILL)."""

    when: Moment
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRank:
    """One worker process stands still (SIGSTOP), for `seconds` or for good."""

    when: Moment
    rank: int
    seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakRank:
    """The collectives of one worker raise, and so do its peers': nobody ends."""

    when: Moment
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExhaustMemory:
    """One worker takes memory until the kernel ends it."""

    when: Moment
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowNode:
    """From that step on each forward and backward of a rank on this node takes `seconds` longer."""

    when: Moment
    node: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AddNode:
    when: Moment
    node: str
    slots: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainNode:
    """A node leaves with notice: after `notice_s` it is gone."""

    when: Moment
    node: str
    notice_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KillController:
    when: Moment


@dataclass(frozen=True, slots=True, kw_only=True)
class FailStorage:
    """Storage refuses writes for `seconds`."""

    when: Moment
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DamageCheckpoint:
    """A byte of the newest committed checkpoint changes, unnoticed until somebody reads it."""

    when: Moment


Fault = (
    KillNode
    | KillRank
    | StopRank
    | BreakRank
    | ExhaustMemory
    | SlowNode
    | AddNode
    | DrainNode
    | KillController
    | FailStorage
    | DamageCheckpoint
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultSchedule:
    """Faults in the order in which they may happen; `seed` is where a random one came from."""

    faults: tuple[Fault, ...]
    seed: int | None = None


def storm(seed: int, *, steps: int, nodes: Sequence[str], ranks: int, faults: int) -> FaultSchedule:
    """A random schedule: the same seed gives the same faults. Nodes that go are followed by others."""
    draw = random.Random(seed)
    made: list[Fault] = []
    for number in range(faults):
        step = draw.randint(1, steps)
        when = Moment(step=step, phase=draw.choice(PHASES), micro_batch=draw.randint(0, 1))
        match draw.randrange(9):
            case 0 | 1:
                made.append(KillNode(when=when, node=draw.choice(nodes)))
                made.append(
                    AddNode(when=Moment(step=min(step + draw.randint(0, 3), steps)), node=f"extra{number}")
                )
            case 2 | 3:
                made.append(KillRank(when=when, rank=draw.randrange(ranks)))
            case 4:
                made.append(
                    StopRank(when=when, rank=draw.randrange(ranks), seconds=draw.choice((1.0, 20.0, None)))
                )
            case 5:
                made.append(DrainNode(when=when, node=draw.choice(nodes), notice_s=draw.choice((2.0, 40.0))))
                made.append(
                    AddNode(when=Moment(step=min(step + draw.randint(0, 3), steps)), node=f"extra{number}")
                )
            case 6:
                made.append(KillController(when=when))
            case 7:
                made.append(DamageCheckpoint(when=when))
            case _:
                made.append(FailStorage(when=when, seconds=draw.choice((2.0, 15.0))))
    return FaultSchedule(faults=tuple(sorted(made, key=lambda f: f.when.step)), seed=seed)
