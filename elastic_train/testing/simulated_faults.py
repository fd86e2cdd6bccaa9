"""What goes wrong at the seams and only the simulator can make go wrong, at a moment as every fault.

On a cluster these are a storage server that is stopped, a script that evaluates for long, a network that is
cut: real parts of their own.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from elastic_train.control.fault_schedule import PHASES, Fault, Moment, storm


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


@dataclass(frozen=True, slots=True, kw_only=True)
class CutOff:
    """For `seconds` nodes are cut off: from the controller, one way or both, from each other, or from
    storage.
    """

    when: Moment
    nodes: tuple[str, ...]
    seconds: float
    words: bool = False
    orders: bool = False
    peers: bool = False
    storage: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FreezeController:
    """The controller's process stands still for `seconds`; what is said meanwhile waits."""

    when: Moment
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JumpClock:
    """The controller's clock jumps, forward or back; nobody else's does."""

    when: Moment
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowWrites:
    """From now on checkpoints take so many times as long to write. Their bytes flow."""

    when: Moment
    times: float


LOST_COMMITS = 4
"""In a storm: a run orders a commit a few times within the time that it bears."""

SimulatedFault = (
    HangStorage
    | LoseCommits
    | Evaluate
    | SlowCode
    | BlindObserver
    | HangRank
    | CutOff
    | FreezeController
    | JumpClock
    | SlowWrites
)
AnyFault = Fault | SimulatedFault


@dataclass(frozen=True, slots=True, kw_only=True)
class Weather:
    """A schedule of both kinds, in the order in which they may happen."""

    faults: tuple[AnyFault, ...]
    seed: int | None = None


def bad_weather(seed: int, *, steps: int, nodes: Sequence[str], ranks: int, faults: int) -> Weather:
    """A storm, and as many faults at the seams. The same seed gives the same.

    A group hangs once at most, as twice at one step ends a run, and few commits are lost.
    """
    draw, may_hang, lost = random.Random(f"seams {seed}"), True, 0
    made: list[AnyFault] = list(storm(seed, steps=steps, nodes=nodes, ranks=ranks, faults=faults).faults)
    for _ in range(faults):
        when = Moment(step=draw.randint(1, steps), phase=draw.choice(PHASES))
        match draw.randrange(10):
            case 0:
                made.append(HangStorage(when=when, seconds=draw.choice((5.0, 45.0))))
            case 1:
                count = min(draw.randint(1, 3), LOST_COMMITS - lost)
                lost += count
                made.append(LoseCommits(when=when, count=count))
            case 2:
                long = Moment(step=when.step, phase="save")
                made.append(Evaluate(when=long, seconds=draw.choice((10.0, 200.0)), mark_s=5.0))
            case 3:
                made.append(SlowCode(when=when, seconds=draw.choice((10.0, 120.0))))
            case 4:
                made.append(BlindObserver(when=when, seconds=draw.choice((1.0, 12.0))))
            case 5 if may_hang:
                made.append(HangRank(when=when, rank=draw.randrange(ranks)))
                may_hang = False
            case 5 | 6:
                cut = _cut_off(draw, when, nodes, peers=may_hang)
                may_hang = may_hang and not cut.peers
                made.append(cut)
            case 7:
                made.append(FreezeController(when=when, seconds=draw.choice((3.0, 20.0, 90.0))))
            case 8:
                made.append(JumpClock(when=when, seconds=draw.choice((-600.0, -5.0, 5.0, 600.0))))
            case _:
                made.append(SlowWrites(when=when, times=draw.choice((5.0, 60.0))))
    return Weather(faults=tuple(sorted(made, key=lambda f: f.when.step)), seed=seed)


def _cut_off(draw: random.Random, when: Moment, nodes: Sequence[str], *, peers: bool) -> CutOff:
    """Any subset of the nodes, by any ways."""
    ways = [draw.random() < 0.4 for _ in range(4)]
    if not any(ways):
        ways[draw.randrange(3)] = True
    words, orders, storage, apart = ways
    return CutOff(
        when=when,
        nodes=tuple(draw.sample(nodes, draw.randint(1, len(nodes)))),
        seconds=draw.choice((3.0, 15.0, 70.0)),
        words=words,
        orders=orders,
        peers=peers and apart,
        storage=storage,
    )
