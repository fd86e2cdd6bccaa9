"""Who is there: nodes, workers, and which nodes get new workers.

A worker that ends before it took part in a committed step was of no use: a flap of its node. A node with too
many of them in a window is quarantined, each time for twice as long, and comes back when the time is over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from elastic_train.control.commands import StartWorker
from elastic_train.control.events import Cause, Node, Straggling
from elastic_train.control.policy import Policy
from elastic_train.control.remembered import remembered
from elastic_train.control.spread import spread
from elastic_train.control.states import Ended, Facts, Flaps, Outcome, Running, State, Waiting, Worker
from elastic_train.control.trouble import rests
from elastic_train.planner.plan import Plan, WorkerSlot

NO_FLAP = ("preemption", "user", "storage")


@remembered
def _by_name(workers: tuple[Worker, ...]) -> dict[str, Worker]:
    return {worker.name: worker for worker in workers}


@remembered
def _noticed(nodes: tuple[Node, ...]) -> frozenset[str]:
    return frozenset([node.name for node in nodes if node.drain_by is not None])


def find(facts: Facts, name: str) -> Worker | None:
    return _by_name(facts.workers).get(name)


def draining(facts: Facts) -> frozenset[str]:
    """Nodes that are leaving with notice, or are left because they are slow."""
    return noticed(facts).union(facts.evicted) if facts.evicted else noticed(facts)


def noticed(facts: Facts) -> frozenset[str]:
    """Nodes whose end was announced."""
    return _noticed(facts.nodes)


def keep_all_nodes(facts: Facts) -> Facts:
    """Leave no node for being slow: the group that was to go on without it is not formed, or needs it."""
    if not facts.evicted:
        return facts
    flaps = tuple(f for f in facts.flaps if not (f.slow and f.node in facts.evicted))
    return replace(facts, evicted=(), flaps=flaps)


def quarantined(facts: Facts, at: float) -> frozenset[str]:
    return frozenset(record.node for record in facts.flaps if record.until > at)


def present(facts: Facts) -> tuple[Worker, ...]:
    """Ready workers on nodes that stay, by age."""
    leaving = draining(facts)
    return tuple([w for w in facts.workers if w.status == "ready" and w.node not in leaving])


def worker_slots(facts: Facts, last: Plan | None) -> tuple[WorkerSlot, ...]:
    """Ready workers on nodes that stay: the last plan's by rank first, then the others by age.

    Of the others, those in failure domains and on nodes with fewer workers before them come first: a plan
    that takes only some then stands in as many domains and on as many nodes as it can. Of equals, those whose
    node has what a lost rank held.
    """
    domains = {node.name: node.domain for node in facts.nodes}
    order = {name: rank for rank, name in enumerate(last.workers)} if last is not None else {}
    ready = present(facts)
    chosen = sorted((w for w in ready if w.name in order), key=lambda w: order[w.name])
    lost = set(order.values()) - {order[w.name] for w in chosen}
    useful = {node for node, rank in at_hand(facts) if rank in lost}
    others = spread([w for w in ready if w.name not in order], chosen, domains, useful)
    slow = dict(facts.slow)
    return tuple(
        WorkerSlot(
            worker=w.name, node=w.node, domain=domains.get(w.node, ""), speed=1.0 / slow.get(w.name, 1.0)
        )
        for w in (*chosen, *others)
    )


def at_hand(facts: Facts) -> frozenset[tuple[str, int]]:
    """Where peer memory holds what: each node, with the ranks of the last plan that it has snapshots of."""
    last = facts.plans[-1][0] if facts.plans else 0
    return frozenset((s.peer_store, s.rank) for s in facts.snapshots or () if s.generation == last)


def starting(facts: Facts) -> tuple[Worker, ...]:
    """Workers on nodes that stay which are not up yet."""
    leaving = draining(facts)
    return tuple([w for w in facts.workers if w.status == "starting" and w.node not in leaving])


def ready(facts: Facts, name: str, at: float) -> Facts:
    for place, worker in enumerate(facts.workers):
        if worker.name == name:
            up = replace(worker, status="ready", since=at)
            return replace(facts, workers=(*facts.workers[:place], up, *facts.workers[place + 1 :]))
    return facts


def without(facts: Facts, worker: Worker, cause: Cause, policy: Policy, at: float) -> tuple[Facts, str]:
    """The facts after a worker's end, and what that means for its node."""
    facts, notes = without_all(facts, {worker.name: cause}, policy, at)
    return facts, "; ".join(notes)


def without_all(
    facts: Facts, causes: Mapping[str, Cause], policy: Policy, at: float
) -> tuple[Facts, list[str]]:
    """The facts after the ends of some workers, and what they mean for their nodes."""
    gone = [worker for worker in facts.workers if worker.name in causes]
    facts = replace(
        facts,
        workers=tuple([w for w in facts.workers if w.name not in causes]),
        local_states=tuple([h for h in facts.local_states if h[0] not in causes]),
        logs=tuple([h for h in facts.logs if h[0] not in causes]),
        slow=tuple([s for s in facts.slow if s[0] not in causes]),
    )
    leaving, notes = draining(facts), list[str]()
    for worker in gone:
        if worker.proven or causes[worker.name].kind in NO_FLAP or worker.node in leaving:
            continue
        facts, note = _flapped(facts, worker.node, policy, at)
        notes += [note] if note else []
    return facts, notes


def straggling(state: State, event: Straggling) -> Outcome:
    """Note who is slower than its peers, or is no more. Slow is not dead: it gets less to do."""
    others = tuple(s for s in state.facts.slow if s[0] != event.worker)
    over = event.factor < 1.0
    slow = others if over else (*others, (event.worker, event.factor))
    if slow == state.facts.slow:
        return Outcome(state=state, reason=f"{event.worker} is known to be slow")
    who = f"{event.worker} (rank {event.rank}, node {event.node})"
    said = f"{who} keeps up again" if over else f"{who} is {event.factor:.1f} times slower than its peers"
    return Outcome(state=replace(state, facts=replace(state.facts, slow=slow)), reason=said)


def proven(facts: Facts, names: tuple[str, ...]) -> Facts:
    """These workers took part in a committed step; their nodes start with a clean record."""
    took_part = set(names)
    workers = tuple(
        replace(w, proven=True) if w.name in took_part and not w.proven else w for w in facts.workers
    )
    good = {w.node for w in facts.workers if w.name in took_part}
    return replace(facts, workers=workers, flaps=tuple(f for f in facts.flaps if f.node not in good))


def staff(state: State, policy: Policy, at: float) -> Outcome:
    """Start workers where there is room, until the largest plan and its standby are staffed."""
    facts = state.facts
    over = isinstance(state.phase, Running) and facts.step >= policy.max_steps
    if over or isinstance(state.phase, Ended):
        return Outcome(state=state)
    if isinstance(state.phase, Running) and rests(facts, at):  # nobody is missed, and starts may need storage
        return Outcome(state=state)
    leaving = draining(facts)
    staying = sum(w.node not in leaving for w in facts.workers)
    wanted = policy.target - staying
    if facts.stopping is not None:  # what is left of the run is a checkpoint
        wanted = policy.min_workers - staying if isinstance(state.phase, Waiting) else 0
    if wanted <= 0:
        return Outcome(state=state)
    taken = Counter(worker.node for worker in facts.workers)
    barred = leaving | quarantined(facts, at)
    room = sum(max(n.slots - taken[n.name], 0) for n in facts.nodes if n.name not in barred)
    if staying + room < policy.min_workers:  # a node that rests is better than none
        barred = leaving | _resting(facts, policy, at)
    born, started = facts.born, list[Worker]()
    for node in _places((n for n in facts.nodes if n.name not in barred), taken, spread=policy.spread)[
        :wanted
    ]:
        born += 1
        started.append(Worker(name=f"w{born:04d}", node=node, status="starting", since=at))
    if not started:
        return Outcome(state=state)
    facts = replace(facts, workers=(*facts.workers, *started), born=born)
    return Outcome(
        state=replace(state, facts=facts),
        commands=tuple(StartWorker(worker=w.name, node=w.node) for w in started),
        reason=f"starting {len(started)} worker{'s' * (len(started) > 1)} on "
        + ", ".join(dict.fromkeys(w.node for w in started)),
    )


def _places(nodes: Iterable[Node], taken: Mapping[str, int], *, spread: bool) -> list[str]:
    """The free places of nodes, in the order in which they are taken: node by node, or spread over them."""
    free = [
        (place, node.name)
        for node in _in_turns(nodes)
        for place in range(taken.get(node.name, 0), node.slots)
    ]
    return [name for _, name in (sorted(free, key=lambda entry: entry[0]) if spread else free)]


def _in_turns(nodes: Iterable[Node]) -> list[Node]:
    """The largest first, those of each failure domain in turns."""
    before = Counter[str]()
    order: list[tuple[int, Node]] = []
    for node in sorted(nodes, key=lambda n: (-n.slots, n.name)):
        domain = node.domain or node.name
        order.append((before[domain], node))
        before[domain] += 1
    return [node for _, node in sorted(order, key=lambda entry: entry[0])]


def _resting(facts: Facts, policy: Policy, at: float) -> frozenset[str]:
    """Nodes that aren't used even where there are no others: each rests as long as after its first time."""
    return frozenset(
        f.node for f in facts.flaps if not f.slow and at < f.until - _rest_s(f, policy) + policy.quarantine_s
    )


def _rest_s(record: Flaps, policy: Policy) -> float:
    """For how long the last quarantine is."""
    return min(policy.quarantine_s * 2.0 ** max(record.quarantines - 1, 0), policy.quarantine_limit_s)


def quarantine(
    facts: Facts, node: str, policy: Policy, at: float, *, slow: bool = False
) -> tuple[Facts, float]:
    """No worker is started on a node for so many seconds, each time for twice as long."""
    record = next((f for f in facts.flaps if f.node == node), Flaps(node=node))
    record = replace(record, ends=(), quarantines=record.quarantines + 1, slow=slow)
    rest = _rest_s(record, policy)
    flaps = (*(f for f in facts.flaps if f.node != node), replace(record, until=at + rest))
    return replace(facts, flaps=flaps), rest


def _flapped(facts: Facts, node: str, policy: Policy, at: float) -> tuple[Facts, str]:
    record = next((f for f in facts.flaps if f.node == node), Flaps(node=node))
    ends = (*(t for t in record.ends if at - t <= policy.flap_window_s), at)
    if len(ends) >= policy.flaps:
        facts, rest = quarantine(facts, node, policy, at)
        return facts, f"node {node} is quarantined for {rest:.0f} s: {len(ends)} of its workers ended unused"
    record, note = replace(record, ends=ends), ""
    return replace(facts, flaps=(*(f for f in facts.flaps if f.node != node), record)), note
