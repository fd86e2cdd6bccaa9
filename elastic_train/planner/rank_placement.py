"""Place ranks on workers: replicas in different failure domains, survivors where they were.

A *part* is what ranks hold that differ only in dp_replicate. A node, or better a failure domain, should hold
a part once: then the loss of one of them leaves a copy of everything. That is a bipartite graph between
domains and parts with given degrees, which exists whenever no domain has more ranks than there are parts
(Gale, "A theorem on flows in networks", 1957); it is grown greedily and mended along alternating paths.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from elastic_train.planner.assignment import assign
from elastic_train.planner.plan import Mesh, Plan, WorkerSlot
from elastic_train.planner.state_moves import HeldParts, part_of, rank_of, shared

Floats = NDArray[np.float64]


def place(
    worker_slots: Sequence[WorkerSlot], mesh: Mesh, previous: Plan | None = None, common: Floats | None = None
) -> tuple[WorkerSlot, ...]:
    """The worker slots by rank. Slots come in order of preference, with room for every rank.

    Ranks that share a micro-batch (tp, cp) are on one node. A part is on distinct domains, else on distinct
    nodes, as far as the slots allow. Within that, workers of `previous` keep most of the bytes that they
    held, and their place among its copies. `common` are the bytes that its parts and the
    new ones share; by default as if every byte were cut by dp_shard alone.
    """
    held: dict[str, tuple[int, int]] = {}
    if previous is not None:
        held = {w: part_of(previous.mesh, r) for r, w in enumerate(previous.workers)}
        if common is None:
            common = shared(HeldParts(mesh=previous.mesh), HeldParts(mesh=mesh), (0.0, 1.0, 0.0))
    block = mesh.block_size
    teams = _teams(worker_slots, block, held)
    outer = replace(mesh, cp=1, tp=1)
    parts, copies = outer.size // outer.dp_replicate, outer.dp_replicate
    chosen = _choose([team[0] for team in teams.values()], outer.size, parts)
    units = _units(chosen, parts)
    worth = _worth(chosen, teams, held, common, block)
    groups = _assign(units, parts, copies, _requests(chosen, worth, copies))
    ranks: dict[int, WorkerSlot] = {}
    order = {slot.worker: i for i, slot in enumerate(slot for unit in units for slot in unit)}
    before = {slot.worker: _block_of(held, slot.worker, block) for slot in chosen if slot.worker in held}
    for part, group in enumerate(groups):
        members = sorted(group, key=lambda s: order[s.worker])
        for copy, slot in enumerate(_copies(members, copies, part, before)):
            first = rank_of(outer, part, copy) * block
            for i, member in enumerate(_in_order(teams[slot.worker], held, common, part * block)):
                ranks[first + i] = member
    return tuple(ranks[rank] for rank in range(mesh.size))


def _teams(
    worker_slots: Sequence[WorkerSlot], block: int, held: Mapping[str, tuple[int, int]]
) -> dict[str, tuple[WorkerSlot, ...]]:
    """A node's slots in blocks, by the name of the first; those that held neighbouring parts are together."""
    if block == 1:
        return {slot.worker: (slot,) for slot in worker_slots}
    nodes: dict[str, list[WorkerSlot]] = {}
    for slot in worker_slots:
        nodes.setdefault(slot.node, []).append(slot)
    teams: list[tuple[WorkerSlot, ...]] = []
    for members in nodes.values():
        ordered = sorted(members, key=lambda s: held.get(s.worker, (1 << 30, 0))[::-1])
        teams += [tuple(ordered[i : i + block]) for i in range(0, len(ordered) - block + 1, block)]
    order = {slot.worker: i for i, slot in enumerate(worker_slots)}
    return {t[0].worker: t for t in sorted(teams, key=lambda t: min(order[s.worker] for s in t))}


def _block_of(held: Mapping[str, tuple[int, int]], worker: str, block: int) -> tuple[int, int]:
    part, copy = held[worker]
    return part // block, copy


def _worth(
    chosen: Sequence[WorkerSlot],
    teams: Mapping[str, tuple[WorkerSlot, ...]],
    held: Mapping[str, tuple[int, int]],
    common: Floats | None,
    block: int,
) -> dict[str, Floats]:
    """By team, the bytes that its workers keep on each block of parts; none where all are equal."""
    found: dict[str, Floats] = {}
    for slot in chosen:
        kept = [
            common[held[s.worker][0]] for s in teams[slot.worker] if s.worker in held and common is not None
        ]
        if kept:
            bytes_ = np.sum([row.reshape(-1, block).max(axis=1) for row in kept], axis=0)
            if np.ptp(bytes_) > 0:
                found[slot.worker] = bytes_
    return found


def _requests(
    chosen: Sequence[WorkerSlot], worth: Mapping[str, Floats], copies: int
) -> list[tuple[str, int]]:
    """(worker, part) so that most bytes stay, all parts' copies counted as places."""
    workers = [slot.worker for slot in chosen if slot.worker in worth]
    if not workers:
        return []
    table = np.repeat(np.stack([worth[w] for w in workers]), copies, axis=1)
    columns = assign(-table)
    return [(w, int(at) // copies) for w, at, row in zip(workers, columns, table, strict=True) if row[at] > 0]


def _in_order(
    team: tuple[WorkerSlot, ...], held: Mapping[str, tuple[int, int]], common: Floats | None, first: int
) -> tuple[WorkerSlot, ...]:
    """A team by tp coordinate: who held a coordinate's bytes takes it."""
    if len(team) == 1 or common is None:
        return team
    none = np.zeros(len(team))
    rows = [common[held[s.worker][0], first : first + len(team)] if s.worker in held else none for s in team]
    places = assign(-np.stack(rows))
    return tuple(
        slot for _, slot in sorted(zip(places.tolist(), team, strict=True), key=lambda pair: pair[0])
    )


def _domain(slot: WorkerSlot) -> tuple[str, str]:
    """A node without a named domain is one of its own."""
    return (slot.domain, "") if slot.domain else ("", slot.node)


def _node(slot: WorkerSlot) -> tuple[str, str]:
    return ("node", slot.node)


def _choose(worker_slots: Sequence[WorkerSlot], count: int, most: int) -> tuple[WorkerSlot, ...]:
    """The first `count` slots with at most `most` per domain, then per node, then as they come.

    The limits are nested, so that taking slots in order of preference takes as many as any choice could.
    """
    taken: dict[int, WorkerSlot] = {}
    used: Counter[tuple[str, str]] = Counter()
    limits: tuple[tuple[Callable[[WorkerSlot], tuple[str, str]], ...], ...] = ((_domain, _node), (_node,), ())
    for limited in limits:
        for i, slot in enumerate(worker_slots):
            if len(taken) < count and i not in taken and all(used[of(slot)] < most for of in limited):
                taken[i] = slot
                used.update({_domain(slot), _node(slot)})
    return tuple(taken[i] for i in sorted(taken))


def _units(worker_slots: Sequence[WorkerSlot], most: int) -> list[list[WorkerSlot]]:
    """Slots that must not share a part: domains, or nodes packed together where a domain is too large."""
    domains: dict[tuple[str, str], dict[str, list[WorkerSlot]]] = {}
    for slot in worker_slots:
        domains.setdefault(_domain(slot), {}).setdefault(slot.node, []).append(slot)
    units: list[list[WorkerSlot]] = []
    for nodes in domains.values():
        opened: list[list[WorkerSlot]] = [[]]
        for node in nodes.values():
            for start in range(0, len(node), most):
                piece = node[start : start + most]
                if len(opened[-1]) + len(piece) > most:
                    opened.append([])
                opened[-1] += piece
        units += opened
    return units


def _assign(
    units: list[list[WorkerSlot]], parts: int, copies: int, requests: list[tuple[str, int]]
) -> list[list[WorkerSlot]]:
    """Slots by part: `copies` each, no two of a unit."""
    worker_slots = [slot for unit in units for slot in unit]
    unit_of = {slot.worker: i for i, unit in enumerate(units) for slot in unit}
    groups: list[dict[int, WorkerSlot]] = [{} for _ in range(parts)]  # by unit
    by_worker = {slot.worker: slot for slot in worker_slots}
    for worker, part in requests:
        if worker in by_worker and len(groups[part]) < copies and unit_of[worker] not in groups[part]:
            groups[part][unit_of[worker]] = by_worker.pop(worker)
    turn = 0
    for slot in (s for s in worker_slots if s.worker in by_worker):
        unit = unit_of[slot.worker]
        turns = ((turn + i) % parts for i in range(parts))
        part = next((p for p in turns if len(groups[p]) < copies and unit not in groups[p]), None)
        if part is None:
            _make_room(groups, copies, unit, slot)
        else:
            groups[part][unit] = slot
            turn = part + 1
    return [list(group.values()) for group in groups]


def _make_room(groups: list[dict[int, WorkerSlot]], copies: int, unit: int, slot: WorkerSlot) -> None:
    """Put a slot into a full part and move others on, along a shortest path that ends in a part with room."""
    came: dict[int, tuple[int, int] | None] = {p: None for p, g in enumerate(groups) if unit not in g}
    queue = deque(came)
    while queue:
        part = queue.popleft()
        if len(groups[part]) < copies:
            while (step := came[part]) is not None:
                origin, moved = step
                groups[part][moved] = groups[origin].pop(moved)
                part = origin
            groups[part][unit] = slot
            return
        for moved in groups[part]:
            for to, group in enumerate(groups):
                if to not in came and moved not in group:
                    came[to] = (part, moved)
                    queue.append(to)
    raise AssertionError("a unit has more slots than there are parts")


def _copies(
    members: list[WorkerSlot], copies: int, part: int, held: Mapping[str, tuple[int, int]]
) -> tuple[WorkerSlot, ...]:
    """The members of a part by copy: who held it before keeps its place, the others fill up in order."""
    kept: dict[int, WorkerSlot] = {}
    for slot in members:
        before, copy = held.get(slot.worker, (-1, 0))
        if before == part and copy < copies:
            kept[copy] = slot
    peer_stores = {slot.worker for slot in kept.values()}
    rest = iter([slot for slot in members if slot.worker not in peer_stores])
    return tuple(kept[copy] if copy in kept else next(rest) for copy in range(copies))
