"""What must hold at every transition of a simulated run, by name."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from elastic_train.control.commands import Commit, Form, Go, StopWorker
from elastic_train.control.events import Event, FinalReport, GroupBroken, GroupReady, StepCommitted, Tick
from elastic_train.control.states import Ended, Facts, Outcome, State
from elastic_train.control.waits import NEVER, waits
from elastic_train.recovery.evidence import Fresh, FromStorage, Live, LocalState, Mixed, Stored, checkpoint_of
from elastic_train.recovery.rank_coverage import part, parts
from elastic_train.testing.simulated_cluster import SimulatedCluster
from elastic_train.testing.simulated_group import SimulatedWorker
from elastic_train.testing.simulated_log import replayable


def check_transition(before: State, event: Event, outcome: Outcome, cluster: SimulatedCluster) -> None:
    """Raises AssertionError with the invariant's name."""
    stale = (
        isinstance(event, GroupReady | StepCommitted | GroupBroken | FinalReport)
        and event.generation != before.facts.lineage.generation
    )
    back = event.at < before.now  # the clock went back, which moves deadlines
    assert not stale or back or outcome.state is before, "words of an older generation change nothing"
    _check_waits(before, event, outcome, cluster)
    for command in outcome.commands:
        match command:
            case Form():
                _check_form(before, command, outcome.state.facts, cluster)
            case Go(generation=generation):
                assert generation == outcome.state.facts.lineage.generation, (
                    "only the newest generation trains"
                )
            case Commit():
                _check_commit(command, cluster)
            case StopWorker(worker=name):
                _check_stop(name, before.facts, outcome.state.facts, cluster)
            case _:
                pass


def _check_waits(before: State, event: Event, outcome: Outcome, cluster: SimulatedCluster) -> None:
    """Something is always on its way, or given up in time."""
    after = outcome.state
    if isinstance(after.phase, Ended) or before.facts.term == 0:
        return
    moved_s = event.moved_s if isinstance(event, Tick) else cluster.moved_s()
    moved = NEVER if moved_s is None else event.at - moved_s
    waiting = waits(after, cluster.policy, moved)
    assert waiting, f"no phase without an outstanding effect or a deadline: {type(after.phase).__name__}"
    if isinstance(event, Tick):
        late = [w.what for w in waiting if w.until is not None and event.at > w.until + 1e-6]
        assert not late, f"a deadline is kept: {', '.join(late)} in {type(after.phase).__name__}"


def _check_form(before: State, form: Form, after: Facts, cluster: SimulatedCluster) -> None:
    facts = before.facts
    origin = form.origin
    step = 0 if isinstance(origin, Fresh) else origin.step
    assert form.generation > facts.lineage.generation, "generations only grow"
    best = _best_step(facts, cluster)
    assert step >= best, f"no committed step is lost beyond what the evidence allows ({step} < {best})"
    if isinstance(origin, Fresh):
        assert not cluster.storage.ever, "a run that committed never starts afresh"
    if isinstance(origin, Live | Mixed):
        held = [h for name in form.holders for h in cluster.workers[name].all_held()]
        peers = form.origin.peers if isinstance(form.origin, Mixed) else ()
        assert set(peers) <= cluster.peers.reported, "what is taken from peer memory was found there"
        held += [LocalState(generation=s.generation, rank=s.rank, step=s.step) for s in peers]
        like = next(h for h in held if h.generation == origin.generation)
        known = replace(
            facts, saves=replace(facts.saves, stored=after.saves.stored)
        )  # the event may be the commit of a nearer base
        replays = form.origin.replays if isinstance(form.origin, Mixed) else ()
        near = {r.base for r in replays if r.peers and cluster.peers.reported.issuperset(r.peers)}
        there = _assembled(like, held, known, step, _known(facts, cluster), near)
        assert there, "what a group starts from is held, or logged, every part of it"
    _follow_line(form, step, cluster)
    group = cluster.group
    if group is not None and group.training and not group.broken and not group.paused:
        living = all(w.responds(cluster.clock.now) for w in group.workers)
        assert not living, "two generations never train at once"


def _follow_line(form: Form, step: int, cluster: SimulatedCluster) -> None:
    """A state is told by who committed its step: a dead generation's never comes back into the lineage."""
    match form.origin:
        case (
            Live(generation=source) | Mixed(generation=source) | FromStorage(stored=Stored(generation=source))
        ):
            start = cluster.forms[source].lineage[-1][1]
        case Fresh():
            source, start = 0, 0
    if cluster.storage.damaged and checkpoint_of(form.origin) is not None:
        cluster.line[step] = source  # anything that reads well is better than nothing
    elif step > start:
        assert cluster.line.get(step) == source, "nothing of a dead generation enters the kept lineage"
    cluster.line = {s: by for s, by in cluster.line.items() if s <= step}


def _check_commit(commit: Commit, cluster: SimulatedCluster) -> None:
    ranks = {part.rank for part in commit.parts}
    assert ranks == set(range(cluster.forms[commit.generation].plan.world_size)), "a commit has every part"


def _best_step(facts: Facts, cluster: SimulatedCluster) -> int:
    """The newest step that the living could assemble, the slow way, from what they really hold."""
    heard = [w for w in _known(facts, cluster) if w.node not in cluster.network.touched]
    living = [w for w in heard if w.responds(cluster.clock.now)]
    held = [h for w in living for h in w.all_held()]
    stored = facts.saves.stored.step if facts.saves.stored is not None else 0
    logs = living if cluster.policy.logs else []
    return max((stored, *(h.step for h in held if _assembled(h, held, facts, h.step, logs))))


def _known(facts: Facts, cluster: SimulatedCluster) -> list[SimulatedWorker]:
    names = {w.name for w in facts.membership.workers}
    return [w for w in cluster.workers.values() if w.name in names]


def _assembled(
    like: LocalState,
    held: list[LocalState],
    facts: Facts,
    step: int,
    logs: list[SimulatedWorker],
    near: Collection[int] = (),
) -> bool:
    """Whether every part is held at a step, or can be replayed up to it from the logs of workers."""
    plan = dict(facts.lineage.plans).get(like.generation)
    starts = dict(facts.lineage.chain)
    later = [first for generation, first in facts.lineage.chain if generation > like.generation]
    if plan is None or like.generation not in starts or any(first < step for first in later):
        return False
    there = {
        part(plan.mesh, h.rank)
        for h in held
        if h.generation == like.generation and (h.step == step or (h.step == step - 1 and h.reached == step))
    }
    lacking = set(parts(plan.mesh)) - there
    if facts.saves.stored is not None and facts.saves.stored.step == step:
        return True  # what nobody holds is in the checkpoint of that step
    if plan.mesh.pp == 1 or like.generation <= facts.survived.unreplayed:
        return not lacking
    bases = [*near, 0 if facts.saves.stored is None else facts.saves.stored.step]  # `near` are in peer memory
    return all(replayable(stage, like, step, plan, bases, logs) for stage, _ in lacking)


def _check_stop(name: str, facts: Facts, after: Facts, cluster: SimulatedCluster) -> None:
    """Those that are late, silent, unknown, on a leaving node, or too few to train and in others' way."""
    if after.membership.rests_until > facts.membership.rests_until and not after.membership.workers:
        ready = [w for w in facts.membership.workers if w.status == "ready"]
        leaving = {node.name for node in facts.membership.nodes if node.drain_by is not None}
        enough = sum(w.node not in leaving for w in ready) >= cluster.policy.min_workers
        assert not enough or facts.membership.evicted, "room is only given by runs that have too little"
        return
    worker = cluster.workers.get(name)
    known = any(w.name == name and w.status == "ready" for w in facts.membership.workers)
    if worker is None or not known or not worker.responds(cluster.clock.now):
        return
    if worker.node in cluster.network.touched:  # what it said may not have been heard
        return
    node = cluster.nodes.get(worker.node)
    assert node is None or node.drain_by is not None, "survivors are never stopped without need"
