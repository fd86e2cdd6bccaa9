"""Membership of nodes and workers: start workers where there is room, quarantine nodes that fail.

A worker that ends before it took part in a committed step was of no use: a flap of its node. A node with too
many of them in a window is quarantined, each time for twice as long, and comes back when the time is over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from elastic_train.control import worker_index
from elastic_train.control.commands import StartWorker
from elastic_train.control.events import Cause, LacksRoom, Node, Straggling
from elastic_train.control.identity_cache import remembered
from elastic_train.control.policy import Policy
from elastic_train.control.spread_over_domains import spread
from elastic_train.control.states import (
    Ended,
    Facts,
    Flaps,
    Forming,
    Membership,
    Outcome,
    Running,
    Settling,
    State,
    Waiting,
    Worker,
)
from elastic_train.control.storage_trouble import rests
from elastic_train.control.worker_index import WorkerIndex
from elastic_train.planner.plan import Plan, WorkerSlot

ORDERS = 4
"""Of nodes without different ones that are barred, which are kept."""

COMES_BACK_S = 1.0
"""How long the start of a worker waits for a group that settles, and again while it forms."""

NO_FLAP = ("preemption", "user", "storage")


@remembered
def _noticed(nodes: tuple[Node, ...]) -> frozenset[str]:
    return frozenset([node.name for node in nodes if node.drain_by is not None])


def find(members: Membership, name: str) -> Worker | None:
    return worker_index.find(members.workers, name)


def _name(number: int) -> str:
    return f"w{number:04d}"


def number_of(worker: str) -> int:
    """The how many-th worker of its run has that name."""
    return int(worker.removeprefix("w"))


def draining(members: Membership) -> frozenset[str]:
    """Nodes that are leaving with notice, or are left because they are slow."""
    return noticed(members).union(members.evicted) if members.evicted else noticed(members)


def noticed(members: Membership) -> frozenset[str]:
    """Nodes whose end was announced."""
    return _noticed(members.nodes)


def keep_all_nodes(members: Membership) -> Membership:
    """Leave no node for being slow: the group that was to go on without it is not formed, or needs it."""
    if not members.evicted:
        return members
    flaps = tuple(f for f in members.flaps if not (f.slow and f.node in members.evicted))
    return replace(members, evicted=(), flaps=flaps)


def quarantined(members: Membership, at: float) -> frozenset[str]:
    return frozenset(record.node for record in members.flaps if record.until > at)


def present(members: Membership) -> tuple[Worker, ...]:
    """Ready workers on nodes that stay, by age."""
    leaving = draining(members)
    return tuple([w for w in members.workers if w.status == "ready" and w.node not in leaving])


def worker_slots(facts: Facts, last: Plan | None) -> tuple[WorkerSlot, ...]:
    """Ready workers on nodes that stay: the last plan's by rank first, then the others by age.

    Of the others, those in failure domains and on nodes with fewer workers before them come first: a plan
    that takes only some then stands in as many domains and on as many nodes as it can. Of equals, those whose
    node has what a lost rank held.
    """
    domains = {node.name: node.domain for node in facts.membership.nodes}
    order = {name: rank for rank, name in enumerate(last.workers)} if last is not None else {}
    ready = present(facts.membership)
    chosen = sorted((w for w in ready if w.name in order), key=lambda w: order[w.name])
    lost = set(order.values()) - {order[w.name] for w in chosen}
    useful = {node for node, rank in at_hand(facts) if rank in lost}
    others = spread([w for w in ready if w.name not in order], chosen, domains, useful)
    slow = dict(facts.membership.slow)
    return tuple(
        WorkerSlot(
            worker=w.name, node=w.node, domain=domains.get(w.node, ""), speed=1.0 / slow.get(w.name, 1.0)
        )
        for w in (*chosen, *others)
    )


def at_hand(facts: Facts) -> frozenset[tuple[str, int]]:
    """Where peer memory holds what: each node, with the ranks of the last plan that it has snapshots of."""
    last = facts.lineage.plans[-1][0] if facts.lineage.plans else 0
    return frozenset((s.peer_store, s.rank) for s in facts.survived.snapshots or () if s.generation == last)


def starting(members: Membership) -> tuple[Worker, ...]:
    """Workers on nodes that stay which are not up yet."""
    leaving = draining(members)
    return tuple([w for w in members.workers if w.status == "starting" and w.node not in leaving])


def ready(members: Membership, name: str, at: float) -> Membership:
    worker = find(members, name)
    if worker is None:
        return members
    up = replace(worker, status="ready", since=at, lacks_room=False)
    return replace(members, workers=worker_index.with_changed(members.workers, up))


def lacks_room(state: State, event: LacksRoom) -> Outcome:
    members = state.facts.membership
    worker = find(members, event.worker)
    if worker is None or worker.status != "starting" or worker.lacks_room:
        return Outcome(state=state, reason=f"{event.worker} waits for no room, or is known to")
    workers = worker_index.with_changed(members.workers, replace(worker, lacks_room=True))
    facts = replace(state.facts, membership=replace(members, workers=workers))
    return Outcome(
        state=replace(state, facts=facts),
        reason=f"{worker.name} waits for room on {worker.node}: {event.holders}",
    )


def without(facts: Facts, worker: Worker, cause: Cause, policy: Policy, at: float) -> tuple[Facts, str]:
    """The facts after a worker's end, and what that means for its node."""
    facts, notes = without_all(facts, {worker.name: cause}, policy, at)
    return facts, "; ".join(notes)


def without_all(
    facts: Facts, causes: Mapping[str, Cause], policy: Policy, at: float
) -> tuple[Facts, list[str]]:
    """The facts after the ends of some workers, and what they mean for their nodes."""
    members, survived = facts.membership, facts.survived
    gone = [worker for name in causes if (worker := find(members, name)) is not None]
    members = replace(
        members,
        workers=worker_index.without(members.workers, gone) if gone else members.workers,
        slow=tuple([s for s in members.slow if s[0] not in causes]),
    )
    leaving, notes = draining(members), list[str]()
    for worker in gone:
        if worker.proven or causes[worker.name].kind in NO_FLAP or worker.node in leaving:
            continue
        members, note = _flapped(members, worker.node, policy, at)
        notes += [note] if note else []
    survived = replace(
        survived,
        local_states=tuple([h for h in survived.local_states if h[0] not in causes]),
        logs=tuple([h for h in survived.logs if h[0] not in causes]),
    )
    return replace(facts, membership=members, survived=survived), notes


def straggling(state: State, event: Straggling) -> Outcome:
    """Note who is slower than its peers, or is no more. Slow is not dead: it gets less to do."""
    facts, members = state.facts, state.facts.membership
    others = tuple(s for s in members.slow if s[0] != event.worker)
    over = event.factor < 1.0
    slow = others if over else (*others, (event.worker, event.factor))
    if slow == members.slow:
        return Outcome(state=state, reason=f"{event.worker} is known to be slow")
    who = f"{event.worker} (rank {event.rank}, node {event.node})"
    said = f"{who} keeps up again" if over else f"{who} is {event.factor:.1f} times slower than its peers"
    facts = replace(facts, membership=replace(members, slow=slow))
    return Outcome(state=replace(state, facts=facts), reason=said)


def proven(members: Membership, names: tuple[str, ...]) -> Membership:
    """These workers took part in a committed step; their nodes start with a clean record."""
    took_part = set(names)
    workers = tuple(
        replace(w, proven=True) if w.name in took_part and not w.proven else w for w in members.workers
    )
    good = {w.node for w in members.workers if w.name in took_part}
    flaps = tuple(f for f in members.flaps if f.node not in good)
    return replace(members, workers=workers, flaps=flaps)


def staff(state: State, policy: Policy, at: float) -> Outcome:
    """Start workers where there is room, until the largest plan and its standby are staffed."""
    facts, members = state.facts, state.facts.membership
    over = isinstance(state.phase, Running) and facts.lineage.step >= policy.max_steps
    if over or isinstance(state.phase, Ended):
        return Outcome(state=state)
    if isinstance(state.phase, Running) and rests(facts.saves, at):
        return Outcome(state=state)  # nobody is missed, and starts may need storage
    if at < members.rests_until or _comes_back(state, at):
        return Outcome(state=state)
    leaving = draining(members)
    index = worker_index.index_of(members.workers)
    staying = len(members.workers) - sum(index.taken[node] for node in leaving)
    wanted = policy.target - staying
    if facts.stopping is not None:  # what is left of the run is a checkpoint
        wanted = policy.min_workers - staying if isinstance(state.phase, Waiting) else 0
    if wanted <= 0:
        return Outcome(state=state)
    free = _places(members.nodes, leaving | quarantined(members, at), index, spread=policy.spread)
    if staying + len(free) < policy.min_workers:  # a node that rests is better than none
        free = _places(members.nodes, leaving | _resting(members, policy, at), index, spread=policy.spread)
    born, started = members.born, list[Worker]()
    for node in free[:wanted]:
        born += 1
        started.append(Worker(name=_name(born), node=node, status="starting", since=at))
    if not started:
        return Outcome(state=state)
    members = replace(members, workers=worker_index.with_new(members.workers, started), born=born)
    facts = replace(facts, membership=members)
    return Outcome(
        state=replace(state, facts=facts),
        commands=tuple(StartWorker(worker=w.name, node=w.node) for w in started),
        reason=f"starting {len(started)} worker{'s' * (len(started) > 1)} on "
        + ", ".join(dict.fromkeys(w.node for w in started)),
    )


def _comes_back(state: State, at: float) -> bool:
    """Whether a group that lost a member comes back with those that are ready: a process that starts would
    take cores from it.
    """
    phase, facts = state.phase, state.facts
    if not isinstance(phase, Settling | Forming) or at - phase.since >= COMES_BACK_S:
        return False
    first = isinstance(phase, Forming) and facts.lineage.generation == 1
    return not first and len(present(facts.membership)) >= phase.plan.world_size


def _places(
    nodes: tuple[Node, ...], barred: frozenset[str], index: WorkerIndex, *, spread: bool
) -> list[str]:
    """The free places of nodes that aren't barred, in the order in which they are taken: node by node, or
    spread over them.
    """
    orders = _orders(nodes)
    if barred not in orders:
        if len(orders) >= ORDERS:
            orders.clear()
        turns = _in_turns(node for node in nodes if node.name not in barred)
        orders[barred] = {name: (turn, slots) for turn, (name, slots) in enumerate(turns)}
    order = orders[barred]
    with_room = sorted([(*order[name], name) for name in index.with_room(nodes) if name in order])
    free = [(place, name) for _, slots, name in with_room for place in range(index.taken[name], slots)]
    return [name for _, name in (sorted(free, key=lambda entry: entry[0]) if spread else free)]


@remembered
def _orders(nodes: tuple[Node, ...]) -> dict[frozenset[str], dict[str, tuple[int, int]]]:
    """The turn of each node and its slots, by who is barred; filled as it is asked for."""
    return {}


def _in_turns(nodes: Iterable[Node]) -> list[tuple[str, int]]:
    """Names and slots: the largest first, those of each failure domain in turns."""
    before = Counter[str]()
    order: list[tuple[int, Node]] = []
    for node in sorted(nodes, key=lambda n: (-n.slots, n.name)):
        domain = node.domain or node.name
        order.append((before[domain], node))
        before[domain] += 1
    return [(node.name, node.slots) for _, node in sorted(order, key=lambda entry: entry[0])]


def _resting(members: Membership, policy: Policy, at: float) -> frozenset[str]:
    """Nodes that aren't used even where there are no others: each rests as long as after its first time."""
    return frozenset(
        f.node
        for f in members.flaps
        if not f.slow and at < f.until - _rest_s(f, policy) + policy.quarantine_s
    )


def _rest_s(record: Flaps, policy: Policy) -> float:
    """For how long the last quarantine is."""
    return min(policy.quarantine_s * 2.0 ** max(record.quarantines - 1, 0), policy.quarantine_limit_s)


def quarantine(
    members: Membership, node: str, policy: Policy, at: float, *, slow: bool = False
) -> tuple[Membership, float]:
    """No worker is started on a node for so many seconds, each time for twice as long."""
    record = next((f for f in members.flaps if f.node == node), Flaps(node=node))
    record = replace(record, ends=(), quarantines=record.quarantines + 1, slow=slow)
    rest = _rest_s(record, policy)
    flaps = (*(f for f in members.flaps if f.node != node), replace(record, until=at + rest))
    return replace(members, flaps=flaps), rest


def _flapped(members: Membership, node: str, policy: Policy, at: float) -> tuple[Membership, str]:
    record = next((f for f in members.flaps if f.node == node), Flaps(node=node))
    ends = (*(t for t in record.ends if at - t <= policy.flap_window_s), at)
    if len(ends) >= policy.flaps:
        members, rest = quarantine(members, node, policy, at)
        return (
            members,
            f"node {node} is quarantined for {rest:.0f} s: {len(ends)} of its workers ended unused",
        )
    flaps = (*(f for f in members.flaps if f.node != node), replace(record, ends=ends))
    return replace(members, flaps=flaps), ""
