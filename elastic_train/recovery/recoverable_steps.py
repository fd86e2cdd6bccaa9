"""Recoverable steps and the cheapest sources for each part of the state.

The unit is a parameter of a part of the state: what one rank holds under a plan, replicas apart. A unit comes
from survivors, from peer memory, from a checkpoint of just that step, or from the replay of its whole stage.
All units of one candidate are of one step and of one generation of the lineage: never of two lineages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from elastic_train.planner.plan import Mesh, Plan
from elastic_train.recovery import local_state_versions
from elastic_train.recovery.costs import Costs
from elastic_train.recovery.evidence import (
    Live,
    LocalState,
    Logged,
    Mixed,
    PeerSnapshot,
    Replay,
    Stored,
    Vote,
)
from elastic_train.recovery.lineage import Lineage, alive
from elastic_train.recovery.rank_coverage import Part, part, parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """What is left of one generation."""

    generation: int
    mesh: Mesh
    local_states: tuple[LocalState, ...] = ()
    snapshots: tuple[PeerSnapshot, ...] = ()
    logs: tuple[Logged, ...] = ()
    votes: Mapping[int, Vote] = field(default_factory=dict[int, Vote])
    stored: Stored | None = None  # of this lineage


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoverableStep:
    """One way to assemble a step. `exact`: to the bit, no undo is part of it."""

    origin: Live | Mixed
    step: int
    seconds: float
    exact: bool

    @property
    def key(self) -> tuple[int, bool, float, int]:
        """The largest is the best: the newest step, exact, cheap, of the youngest generation."""
        return self.step, self.exact, -self.seconds, self.origin.generation


def candidates(
    lefts: Iterable[Left], lineage: Lineage, costs: Costs, newest: int | None = None
) -> tuple[RecoverableStep, ...]:
    """One candidate for each generation and step that can be assembled, at most at step `newest`."""
    found: list[RecoverableStep] = []
    for left in lefts:
        for step in sorted(_steps(left)):
            if alive(lineage, left.generation, step) and (newest is None or step <= newest):
                candidate = _assemble(left, step, costs)
                if candidate is not None:
                    found.append(candidate)
    return tuple(found)


def group(
    local_states: Iterable[LocalState],
    snapshots: Iterable[PeerSnapshot],
    logs: Iterable[Logged],
    plans: Mapping[int, Plan],
    votes: Mapping[tuple[int, int], Vote],
    stored: Stored | None,
) -> tuple[Left, ...]:
    """Evidence by generation; that of a generation whose plan is forgotten says nothing."""
    held, kept, logged = tuple(local_states), tuple(snapshots), tuple(logs)
    return tuple(
        Left(
            generation=generation,
            mesh=plan.mesh,
            local_states=tuple(h for h in held if h.generation == generation),
            snapshots=tuple(s for s in kept if s.generation == generation),
            logs=tuple(log for log in logged if log.generation == generation),
            votes={step: vote for (of, step), vote in votes.items() if of == generation},
            stored=stored,
        )
        for generation, plan in sorted(plans.items())
    )


def _steps(left: Left) -> frozenset[int]:
    logged = {log.last for log in left.logs}
    return local_state_versions.steps(left.local_states) | {s.step for s in left.snapshots} | logged


def _assemble(left: Left, step: int, costs: Costs) -> RecoverableStep | None:
    vote = left.votes.get(step)
    names = local_state_versions.names(left.local_states)
    missing: list[Part] = []
    by_part: dict[Part, list[LocalState]] = {}
    for held in left.local_states:
        by_part.setdefault(part(left.mesh, held.rank), []).append(held)
    ways = set[local_state_versions.Way | None]()
    for at in parts(left.mesh):
        here = by_part.get(at, [])
        best: list[local_state_versions.Way | None] = [
            _best(local_state_versions.way(h, name, step, vote) for h in here) for name in names
        ]
        if None in best:
            missing.append(at)
        else:
            ways.update(best)
    seconds = [costs.update_s * (2 if "undo" in ways else "forward" in ways)]
    peers: list[PeerSnapshot] = []
    unserved: list[Part] = []
    kept = _kept(left, step) if missing else {}
    for at in missing:
        copies = _copies(kept.get(at, ()))
        peers += copies
        if copies:
            seconds.append(costs.peer_s())
        else:
            unserved.append(at)
    stored, replays = None, tuple[Replay, ...]()
    if unserved and _at_step(left, step):
        stored = left.stored
        seconds.append(costs.storage_s())
    elif unserved:
        found = _replays(left, unserved, step, costs)
        if found is None:
            return None
        replays = tuple(replay for replay, _ in found)
        seconds += [cost for _, cost in found]
    if not peers and not ways and not replays:
        return None  # nothing but the checkpoint: that is another rung
    # Every holder that can roll forward does, needed or not: it is cheaper than fetching.
    able = any(
        local_state_versions.way(h, name, step, vote) == "forward"
        for h in left.local_states
        for name in names
    )
    # Parameters that are ahead are there, but not what else the step changes.
    able = able or any(h.ahead and h.step == step - 1 for h in left.local_states)
    rolled = vote if able else None
    undo = "undo" in ways
    origin: Live | Mixed = Live(generation=left.generation, step=step, vote=rolled, undo=undo)
    if missing:
        origin = Mixed(
            generation=left.generation,
            step=step,
            vote=rolled,
            undo=undo,
            peers=tuple(peers),
            stored=stored,
            replays=replays,
        )
    return RecoverableStep(origin=origin, step=step, seconds=max(seconds), exact=not undo)


def _best(found: Iterable[local_state_versions.Way | None]) -> local_state_versions.Way | None:
    """The cheapest way of several survivors; exact ones first."""
    there = set(found)
    return next((way for way in local_state_versions.WAYS if way in there), None)


def _kept(left: Left, step: int) -> dict[Part, list[PeerSnapshot]]:
    """The snapshots of a step by the part that they hold."""
    found: dict[Part, list[PeerSnapshot]] = {}
    for snapshot in left.snapshots:
        if snapshot.step == step:
            found.setdefault(part(left.mesh, snapshot.rank), []).append(snapshot)
    return found


def _copies(there: Iterable[PeerSnapshot]) -> tuple[PeerSnapshot, ...]:
    """Those of a part that hold it whole between them, one for each share; none where a share is lacking."""
    by_cut: dict[int, dict[int, PeerSnapshot]] = {}
    for snapshot in there:
        share, of = snapshot.share
        by_cut.setdefault(of, {}).setdefault(share, snapshot)
    whole = [of for of, shares in by_cut.items() if len(shares) == of]
    return tuple(by_cut[min(whole)].values()) if whole else ()


def _replays(
    left: Left, lacking: Sequence[Part], step: int, costs: Costs
) -> list[tuple[Replay, float]] | None:
    """A replay for each stage that lacks parts, from the newest base that its log reaches; None if one can't.

    The whole stage is replayed, or its group. Its ranks compute together: there have to be as many workers.
    """
    made: list[tuple[Replay, float]] = []
    logs = {stage: log for log in left.logs for stage in range(*log.stages) if log.first <= step <= log.last}
    lost, lacks = {at[0] for at in lacking}, set(lacking)
    if not lost <= logs.keys():
        return None
    for log in dict.fromkeys(logs[stage] for stage in sorted(lost)):
        own = [at for at in parts(left.mesh) if at[0] in range(*log.stages)]
        gone = tuple(at for at in own if at in lacks)
        exact = any(at[0] in lost and at not in lacks for at in own)
        ranks = left.mesh.copy_size * (left.mesh.dp_replicate if exact else 1)
        if ranks > costs.replayers:
            return None
        replay = Replay(log=log, base=0, lost=gone, exact=exact)
        options: list[tuple[Replay, float]] = []
        for base in {s.step for s in left.snapshots if log.first - 1 <= s.step < step}:
            kept = _kept(left, base)
            copies = [_copies(kept.get(at, ())) for at in own]
            if all(copies):
                peers = tuple(snapshot for copy in copies for snapshot in copy)
                cost = costs.peer_s() + costs.replay_s(step - base, ranks)
                options.append((replace(replay, base=base, peers=peers), cost))
        stored = left.stored
        if stored is not None and log.first - 1 <= stored.step < step:
            cost = costs.storage_s() + costs.replay_s(step - stored.step, ranks)
            options.append((replace(replay, base=stored.step, stored=stored), cost))
        if log.first == 1 and not options:  # what the seed gives is a base too
            options.append((replay, costs.replay_s(step, ranks)))
        if not options:
            return None
        made.append(min(options, key=lambda option: option[1]))
    return made


def _at_step(left: Left, step: int) -> bool:
    return left.stored is not None and left.stored.step == step
