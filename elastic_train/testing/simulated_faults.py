"""What goes wrong at the seams and only the simulator can make go wrong, at a moment as every fault.

On a cluster these are a storage server that is stopped, a script that evaluates for long, a network that is
cut: real parts of their own.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from elastic_train.control.faults import PHASES, Fault, Moment, storm


@dataclass(frozen=True, slots=True, kw_only=True)
class HangStorage:
    """Storage neither answers nor refuses anything for `seconds`; then it does all that it was asked to."""

    when: Moment
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoseCommits:
    """Of the next `count` commits nobody hears anything: half of them are done."""

    when: Moment
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluate:
    """After that step the group evaluates for `seconds`, with a mark every `mark_s`."""

    when: Moment
    seconds: float
    mark_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowCode:
    """The next group that forms spends `seconds` in the job's own code."""

    when: Moment
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BlindObserver:
    """For `seconds` the controller sees no node at all."""

    when: Moment
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HangRank:
    """A rank stands still where it is, for good; its heartbeats go on."""

    when: Moment
    rank: int


SimulatedFault = HangStorage | LoseCommits | Evaluate | SlowCode | BlindObserver | HangRank
AnyFault = Fault | SimulatedFault


@dataclass(frozen=True, slots=True, kw_only=True)
class Weather:
    """A schedule of both kinds, in the order in which they may happen."""

    faults: tuple[AnyFault, ...]
    seed: int | None = None


def bad_weather(seed: int, *, steps: int, nodes: Sequence[str], ranks: int, faults: int) -> Weather:
    """A storm, and as many faults at the seams. The same seed gives the same."""
    draw = random.Random(f"seams {seed}")
    made: list[AnyFault] = list(storm(seed, steps=steps, nodes=nodes, ranks=ranks, faults=faults).faults)
    for _ in range(faults):
        when = Moment(step=draw.randint(1, steps), phase=draw.choice(PHASES))
        match draw.randrange(6):
            case 0:
                made.append(HangStorage(when=when, seconds=draw.choice((5.0, 45.0))))
            case 1:
                made.append(LoseCommits(when=when, count=draw.randint(1, 3)))
            case 2:
                long = Moment(step=when.step, phase="save")
                made.append(Evaluate(when=long, seconds=draw.choice((10.0, 200.0)), mark_s=5.0))
            case 3:
                made.append(SlowCode(when=when, seconds=draw.choice((10.0, 120.0))))
            case 4:
                made.append(BlindObserver(when=when, seconds=draw.choice((1.0, 12.0))))
            case _:
                made.append(HangRank(when=when, rank=draw.randrange(ranks)))
    return Weather(faults=tuple(sorted(made, key=lambda f: f.when.step)), seed=seed)
