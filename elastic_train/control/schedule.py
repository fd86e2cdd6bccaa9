"""Save schedule: when to take snapshots and checkpoints, on every tier.

How often is the interval that balances the cost of saving against the work a failure loses.

Young, "A first order approximation to the optimum checkpoint interval", CACM 1974: sqrt(2 x cost x mean time
between failures), valid while the cost is small against the mean time; Daly, FGCS 2006, has the higher
orders.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

PEER_SHARE = 0.02
"""Share of the time that snapshots to peer memory may take: where they are cheaper, Young's interval is no
limit, as each one that is left out can only lose work."""

PRIOR_MTBF_S = 3600.0
UNCOVERED_MTBF_S = 10 * PRIOR_MTBF_S
"""The same for failures that take both copies in peer memory at once, or everything."""

LEAST_SHARE = 0.05
"""Of the time until a checkpoint is durable, what is charged at least: storage has a price as well."""

FIRST_SAVE_S = 60.0


def mtbf_s(*, elapsed_s: float, failures: int, prior_s: float = PRIOR_MTBF_S) -> float:
    """Mean time between failures as observed; one failure in `prior_s` is what is believed beforehand."""
    return (prior_s + elapsed_s) / (1 + failures)


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalInputs:
    """What the interval between two checkpoints follows from.

    `cost_s` is what one takes from training: its steps were longer than others by that much. `save_s` is how
    long it takes to be durable. `failures` are those that this tier answers: with `peers`, only what their
    memory could not.
    """

    save_s: float | None
    cost_s: float | None
    elapsed_s: float
    failures: int
    peers: bool

    @property
    def mtbf_s(self) -> float:
        prior = UNCOVERED_MTBF_S if self.peers else PRIOR_MTBF_S
        return mtbf_s(elapsed_s=self.elapsed_s, failures=self.failures, prior_s=prior)

    @property
    def charged_s(self) -> float:
        """The cost of one: what was measured, else as if training stood still until it is durable."""
        save_s = self.save_s or 0.0
        return save_s if self.cost_s is None else max(self.cost_s, LEAST_SHARE * save_s)


def interval_s(inputs: IntervalInputs) -> float:
    """Seconds between two checkpoints: Young's, never less than one takes; before the first a minute.

    Each tier has its own interval, by its own cost and the failures that only it answers, as in the two-level
    schemes of Vaidya (1995) and Moody et al. (SCR, SC'10).
    """
    if inputs.save_s is None:
        return FIRST_SAVE_S
    return max(math.sqrt(2 * inputs.charged_s * inputs.mtbf_s), inputs.save_s)


def explained(inputs: IntervalInputs, step_s: float) -> str:
    """The interval, in steps and in a sentence's words."""
    seconds = interval_s(inputs)
    steps = f", about {max(round(seconds / step_s), 1)} steps" if step_s > 0 else ""
    if inputs.save_s is None:
        return f"the first after {seconds:.0f} s{steps}"
    lost = "a failure that peer memory cannot answer" if inputs.peers else "a failure"
    return (
        f"every {seconds:.0f} s{steps}: each takes {inputs.charged_s:.2g} s from training and "
        f"{inputs.save_s:.2g} s to be durable, {lost} is expected every {inputs.mtbf_s / 60:.0f} min"
    )


def peer_interval_s(cost_s: float, mtbf: float = PRIOR_MTBF_S) -> float:
    """Seconds between two snapshots to peer memory, each of which takes `cost_s` from training: 0 until that
    is known.
    """
    return min(math.sqrt(2 * cost_s * mtbf), cost_s / PEER_SHARE)


def storage_is_due(
    inputs: IntervalInputs, *, asked_s: float | None, under_way: bool, progress_s: float
) -> bool:
    """Whether the controller asks for a checkpoint, `asked_s` seconds after it asked for the last one (None:
    not yet). While one is under way a new attempt would supersede it.
    """
    if asked_s is None or (under_way and asked_s < progress_s):
        return False
    return asked_s >= interval_s(inputs)


def peer_is_due(every: int | Literal["auto"], *, steps: int, seconds: float, cost_s: float) -> bool:
    """Whether a snapshot goes to peer memory, `steps` and `seconds` after the last one."""
    return steps >= every if every != "auto" else seconds >= peer_interval_s(cost_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryDecision:
    """What is taken at a step boundary: a snapshot at all, for storage too, waiting for room; `owed` is made
    up for at a later one.
    """

    snapshot: bool
    storage: bool
    wait: bool
    owed: bool


def at_boundary(
    *,
    step: int,
    last: bool,
    pausing: bool,
    every: int | Literal["auto"],
    pressure: Literal["wait", "skip", "coalesce"],
    asked: bool,
    owed: bool,
    may_be_best: bool,
    no_room_for_storage: bool,
    peers_wanted: bool,
) -> BoundaryDecision:
    """What every rank takes after `step`; `asked` for by the controller or a person, `owed` from before.

    The last step's and a pause's checkpoints wait for room, and so does that of a state which may be the
    best: later it is another one. For the rest the policy of `pressure` says what happens.
    """
    best = may_be_best and pressure != "skip"
    due = owed or best or asked or last or (every != "auto" and step % every == 0)
    wait = due and (last or pausing or best or pressure == "wait")
    storage = wait or (due and not no_room_for_storage)
    return BoundaryDecision(
        snapshot=storage or peers_wanted,
        storage=storage,
        wait=wait,
        owed=due and not storage and pressure == "coalesce",
    )
