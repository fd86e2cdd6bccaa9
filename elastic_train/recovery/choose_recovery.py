"""Chooses how to recover: the newest recoverable step, at the least cost.

A step is assembled part by part from what is left of one generation of the lineage: survivors that stand
there, that roll forward with the reduced gradient they kept, or that undo a step; peer memory; the replay of
a stage from the log of its boundary. Of several ways to one step an exact one comes before an undo, a cheap
one before a dear one. Where nothing assembles a step that is newer than the last committed checkpoint, the
checkpoint is the origin. Only a run that never committed one may start afresh.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elastic_train.planner.plan import Plan
from elastic_train.recovery import explain_choice, local_state_versions
from elastic_train.recovery.costs import Costs
from elastic_train.recovery.evidence import (
    Fresh,
    FromStorage,
    Live,
    LocalState,
    Logged,
    Mixed,
    Origin,
    PeerSnapshot,
    Stored,
    Vote,
)
from elastic_train.recovery.lineage import Lineage, alive
from elastic_train.recovery.rank_coverage import missing
from elastic_train.recovery.recoverable_steps import RecoverableStep, candidates, group


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What is left of a run. `seen` is the last vote that the controller saw, with its generation.

    `step` is the newest step known to be committed in the lineage: what is lost is counted from it.
    """

    lineage: Lineage
    plans: Mapping[int, Plan]
    local_states: tuple[tuple[str, tuple[LocalState, ...]], ...]  # by worker
    step: int
    seen: tuple[int, Vote] | None
    stored: Stored | None
    ever_stored: bool
    snapshots: tuple[PeerSnapshot, ...] = ()
    logs: tuple[Logged, ...] = ()
    costs: Costs = field(default_factory=Costs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Where the next generation starts. `lost` committed steps are run again; `seconds` is the estimate."""

    origin: Origin
    step: int
    lost: int
    reason: str
    seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unrecoverable:
    """The run committed before and nothing of it can be loaded."""

    reason: str


def choose(evidence: Evidence) -> Choice | Unrecoverable:
    """The newest step that can be assembled; of equals, the exact, the cheap, of the younger generation."""
    best = max(options(evidence), key=lambda c: c.key, default=None)
    stored, costs = evidence.stored, evidence.costs
    if best is not None and not (stored is not None and _from_storage_first(best, stored, costs)):
        reason = explain_choice.assembled(best.origin, len(holders(evidence, best.origin)))
        return _choice(evidence, best.origin, best.step, reason, best.seconds)
    if stored is not None:
        reason = f"from the checkpoint of step {stored.step}: {_why_not_live(evidence)}"
        return _choice(evidence, FromStorage(stored=stored), stored.step, reason, costs.storage_s())
    if evidence.ever_stored:
        return Unrecoverable(
            reason=f"the run committed checkpoints and none of them can be read; {_why_not_live(evidence)}"
        )
    reason = f"from step 0: no checkpoint was ever committed and {_why_not_live(evidence)}"
    return _choice(evidence, Fresh(), 0, reason, 0.0)


def options(evidence: Evidence) -> tuple[RecoverableStep, ...]:
    """Every step that survivors, peer memory and logs assemble, with or without the checkpoint's help."""
    stored = evidence.stored
    if stored is not None and not alive(evidence.lineage, stored.generation, stored.step):
        stored = None  # a checkpoint of another lineage is no part of a mixture
    lefts = group(
        (h for _, held in evidence.local_states for h in held),
        evidence.snapshots,
        evidence.logs,
        evidence.plans,
        votes(evidence),
        stored,
    )
    return candidates(lefts, evidence.lineage, evidence.costs)


def holders(evidence: Evidence, origin: Origin) -> tuple[str, ...]:
    """The workers whose local states the origin takes fragments from."""
    if not isinstance(origin, Live | Mixed):
        return ()
    return tuple(
        worker
        for worker, held in evidence.local_states
        if any(h.generation == origin.generation and _serves(h, origin) for h in held)
    )


def votes(evidence: Evidence) -> dict[tuple[int, int], Vote]:
    """Every known outcome, by (generation, step)."""
    every = [local_state for _, held in evidence.local_states for local_state in held]
    known = {(h.generation, h.passed.step): h.passed for h in every if h.passed is not None}
    known |= {(h.generation, h.applied.step): h.applied for h in every if h.applied is not None}
    if evidence.seen is not None:
        generation, vote = evidence.seen
        known[generation, vote.step] = vote
    return known


def _serves(local_state: LocalState, origin: Live | Mixed) -> bool:
    """Whether any part of a local state gets to the origin's step."""
    found = {
        local_state_versions.way(local_state, n, origin.step, origin.vote)
        for n in local_state_versions.names((local_state,))
    }
    return bool(found & ({"live", "forward", "undo"} if origin.undo else {"live", "forward"}))


def _from_storage_first(best: RecoverableStep, stored: Stored, costs: Costs) -> bool:
    """Whether the checkpoint is newer, or of the same step and exact or cheaper where the other isn't."""
    if best.step != stored.step:
        return best.step < stored.step
    return (best.exact, -best.seconds) < (True, -costs.storage_s())


def _choice(evidence: Evidence, origin: Origin, step: int, reason: str, seconds: float) -> Choice:
    lost = max(evidence.step - step, 0)
    again = "1 committed step is" if lost == 1 else f"{lost} committed steps are"
    cost = f"{again} run again" if lost else "no committed step is lost"
    seconds += evidence.costs.again_s(lost)
    return Choice(origin=origin, step=step, lost=lost, reason=f"{reason}; {cost}", seconds=seconds)


def _why_not_live(evidence: Evidence) -> str:
    """What stops the survivors from being the source."""
    if not evidence.local_states:
        return "no worker holds any state"
    for generation, _ in reversed(evidence.lineage):
        ranks = {h.rank for _, held in evidence.local_states for h in held if h.generation == generation}
        plan = evidence.plans.get(generation)
        if plan is not None and ranks:
            gone = missing(plan.mesh, ranks)
            if gone:
                return f"nobody holds the part of rank {gone[0]} of generation {generation}"
            return f"what the workers hold of generation {generation} covers no newer step"
    return "what the workers hold belongs to no generation of the lineage"
