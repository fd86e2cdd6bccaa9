"""The ladder back: the newest step that the evidence can assemble, at the least cost, and why.

A step is assembled from holdings of one generation of the lineage. A rank counts at step s if it stands
there, or if it stands at s - 1, kept the reduced gradient of s, and the outcome of the vote on s is known:
then it rolls forward, bitwise like those that passed. Where no survivors cover a step that is newer than the
last committed checkpoint, the checkpoint is the origin. Only a run that never committed one may start afresh.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from elastic_train.planner.plan import Plan
from elastic_train.recovery.coverage import covers, missing
from elastic_train.recovery.evidence import Fresh, FromStorage, Holding, Live, Origin, Stored, Vote
from elastic_train.recovery.lineage import Lineage, alive


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What is left of a run. `seen` is the last vote that the controller saw, with its generation.

    `step` is the newest step known to be committed in the lineage: what is lost is counted from it.
    """

    lineage: Lineage
    plans: Mapping[int, Plan]
    holdings: tuple[tuple[str, tuple[Holding, ...]], ...]  # by worker
    step: int
    seen: tuple[int, Vote] | None
    stored: Stored | None
    ever_stored: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Where the next generation starts. `lost` committed steps are run again."""

    origin: Origin
    step: int
    lost: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unrecoverable:
    """The run committed before and nothing of it can be loaded."""

    reason: str


def choose(evidence: Evidence) -> Choice | Unrecoverable:
    """The newest step that can be assembled; of equals, the one in memory, of the younger generation."""
    live = _newest_live(evidence)
    stored = evidence.stored
    if live is not None and (stored is None or live.step >= stored.step):
        return _choice(evidence, live, live.step, _live_reason(evidence, live))
    if stored is not None:
        why = _why_not_live(evidence)
        return _choice(
            evidence,
            FromStorage(stored=stored),
            stored.step,
            f"from the checkpoint of step {stored.step}: {why}",
        )
    if evidence.ever_stored:
        return Unrecoverable(
            reason=f"the run committed checkpoints and none of them can be read; {_why_not_live(evidence)}"
        )
    return _choice(
        evidence, Fresh(), 0, f"from step 0: no checkpoint was ever committed and {_why_not_live(evidence)}"
    )


def holders(evidence: Evidence, origin: Origin) -> tuple[str, ...]:
    """The workers whose holdings the origin takes fragments from."""
    if not isinstance(origin, Live):
        return ()
    return tuple(
        worker
        for worker, held in evidence.holdings
        if any(h.generation == origin.generation and _stands_at(h, origin.step, origin.vote) for h in held)
    )


def _newest_live(evidence: Evidence) -> Live | None:
    """The newest covered step; among its generations the youngest."""
    votes = _votes(evidence)
    by_generation: dict[int, list[Holding]] = {}
    for _, held in evidence.holdings:
        for holding in held:
            by_generation.setdefault(holding.generation, []).append(holding)
    best: Live | None = None
    for generation, held in sorted(by_generation.items()):
        plan = evidence.plans.get(generation)
        if plan is None:
            continue
        steps = {h.step for h in held} | {h.reached for h in held if h.reached is not None}
        for step in sorted(steps):
            if (best is not None and step < best.step) or not alive(evidence.lineage, generation, step):
                continue
            vote = votes.get((generation, step))
            if covers(plan.mesh, {h.rank for h in held if _stands_at(h, step, vote)}):
                behind = any(h.step == step - 1 and h.reached == step for h in held)
                best = Live(generation=generation, step=step, vote=vote if behind else None)
    return best


def _stands_at(holding: Holding, step: int, vote: Vote | None) -> bool:
    return holding.step == step or (vote is not None and holding.step == step - 1 and holding.reached == step)


def _votes(evidence: Evidence) -> dict[tuple[int, int], Vote]:
    """Every known outcome, by (generation, step)."""
    known = {
        (holding.generation, holding.applied.step): holding.applied
        for _, held in evidence.holdings
        for holding in held
        if holding.applied is not None
    }
    if evidence.seen is not None:
        generation, vote = evidence.seen
        known.setdefault((generation, vote.step), vote)
    return known


def _choice(evidence: Evidence, origin: Origin, step: int, reason: str) -> Choice:
    lost = max(evidence.step - step, 0)
    again = "1 committed step is" if lost == 1 else f"{lost} committed steps are"
    cost = f"{again} run again" if lost else "no committed step is lost"
    return Choice(origin=origin, step=step, lost=lost, reason=f"{reason}; {cost}")


def _live_reason(evidence: Evidence, live: Live) -> str:
    forward = " after rolling forward" if live.vote is not None else ""
    count = len(holders(evidence, live))
    return f"{count} workers hold step {live.step} of generation {live.generation}{forward}"


def _why_not_live(evidence: Evidence) -> str:
    """What stops the survivors from being the source."""
    if not evidence.holdings:
        return "no worker holds any state"
    for generation, _ in reversed(evidence.lineage):
        ranks = {h.rank for _, held in evidence.holdings for h in held if h.generation == generation}
        plan = evidence.plans.get(generation)
        if plan is not None and ranks:
            gone = missing(plan.mesh, ranks)
            if gone:
                return f"nobody holds the part of rank {gone[0]} of generation {generation}"
            return f"what the workers hold of generation {generation} covers no newer step"
    return "what the workers hold belongs to no generation of the lineage"
