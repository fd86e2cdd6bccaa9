"""Who takes which rank: copies of one part of the state apart from each other, survivors where they were.

A *part* is what ranks hold that differ only in dp_replicate. A node, or better a failure domain, should hold
a part once: then the loss of one of them leaves a copy of everything. That is a bipartite graph between
domains and parts with given degrees, which exists whenever no domain has more ranks than there are parts
(Gale, "A theorem on flows in networks", 1957); it is grown greedily and mended along alternating paths.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence

from elastic_train.planner.plan import Mesh, Plan, Seat


def place(seats: Sequence[Seat], mesh: Mesh, previous: Plan | None = None) -> tuple[Seat, ...]:
    """The seats by rank. `seats` come in order of preference, at least as many as there are ranks.

    A part is on distinct domains, else on distinct nodes, as far as the seats allow. Within that, workers of
    `previous` keep the part that shares most with what they held, and their place among its copies.
    """
    parts, copies = mesh.size // mesh.dp_replicate, mesh.dp_replicate
    chosen = _choose(seats, mesh.size, parts)
    units = _units(chosen, parts)
    held = {} if previous is None else {w: _part(previous.mesh, r) for r, w in enumerate(previous.workers)}
    shards = 1 if previous is None else previous.mesh.dp_shard
    groups = _assign(units, parts, copies, _wishes(chosen, mesh.dp_shard, held, shards))
    ranks: dict[int, Seat] = {}
    order = {seat.worker: i for i, seat in enumerate(seat for unit in units for seat in unit)}
    for part, group in enumerate(groups):
        members = sorted(group, key=lambda s: order[s.worker])
        for copy, seat in enumerate(_copies(members, copies, part, held)):
            ranks[_rank(mesh, part, copy)] = seat
    return tuple(ranks[rank] for rank in range(mesh.size))


def _rank(mesh: Mesh, part: int, copy: int) -> int:
    inner = mesh.size // mesh.pp // mesh.dp_replicate
    stage, place_ = divmod(part, inner)
    return (stage * mesh.dp_replicate + copy) * inner + place_


def _part(mesh: Mesh, rank: int) -> tuple[int, int]:
    """The inverse of `_rank`: (part, copy)."""
    inner = mesh.size // mesh.pp // mesh.dp_replicate
    row, place_ = divmod(rank, inner)
    stage, copy = divmod(row, mesh.dp_replicate)
    return stage * inner + place_, copy


def _domain(seat: Seat) -> tuple[str, str]:
    """A node without a named domain is one of its own."""
    return (seat.domain, "") if seat.domain else ("", seat.node)


def _node(seat: Seat) -> tuple[str, str]:
    return ("node", seat.node)


def _choose(seats: Sequence[Seat], count: int, most: int) -> tuple[Seat, ...]:
    """The first `count` seats with at most `most` per domain, then per node, then as they come.

    The limits are nested, so that taking seats in order of preference takes as many as any choice could.
    """
    taken: dict[int, Seat] = {}
    used: Counter[tuple[str, str]] = Counter()
    limits: tuple[tuple[Callable[[Seat], tuple[str, str]], ...], ...] = ((_domain, _node), (_node,), ())
    for limited in limits:
        for i, seat in enumerate(seats):
            if len(taken) < count and i not in taken and all(used[of(seat)] < most for of in limited):
                taken[i] = seat
                used.update({_domain(seat), _node(seat)})
    return tuple(taken[i] for i in sorted(taken))


def _units(seats: Sequence[Seat], most: int) -> list[list[Seat]]:
    """Seats that must not share a part: domains, or nodes packed together where a domain is too large."""
    domains: dict[tuple[str, str], dict[str, list[Seat]]] = {}
    for seat in seats:
        domains.setdefault(_domain(seat), {}).setdefault(seat.node, []).append(seat)
    units: list[list[Seat]] = []
    for nodes in domains.values():
        opened: list[list[Seat]] = [[]]
        for node in nodes.values():
            for start in range(0, len(node), most):
                piece = node[start : start + most]
                if len(opened[-1]) + len(piece) > most:
                    opened.append([])
                opened[-1] += piece
        units += opened
    return units


def _wishes(
    seats: Sequence[Seat], new: int, held: Mapping[str, tuple[int, int]], old: int
) -> list[tuple[str, int]]:
    """(worker, part) with the largest share of old bytes first; nothing where everyone held everything."""
    wishes: list[tuple[int, int, int, str]] = []
    for i, seat in enumerate(seats):
        if seat.worker in held and old > 1:
            at, _ = held[seat.worker]
            # Shard `at` of `old` as an interval of a line of length old * new; new shards are `old` long.
            for to in range(at * new // old, -(-(at + 1) * new // old)):
                shared = min((at + 1) * new, (to + 1) * old) - max(at * new, to * old)
                wishes.append((-shared, i, to, seat.worker))
    return [(worker, to) for _, _, to, worker in sorted(wishes)]


def _assign(
    units: list[list[Seat]], parts: int, copies: int, wishes: list[tuple[str, int]]
) -> list[list[Seat]]:
    """Seats by part: `copies` each, no two of a unit."""
    seats = [seat for unit in units for seat in unit]
    unit_of = {seat.worker: i for i, unit in enumerate(units) for seat in unit}
    groups: list[dict[int, Seat]] = [{} for _ in range(parts)]  # by unit
    by_worker = {seat.worker: seat for seat in seats}
    for worker, part in wishes:
        if worker in by_worker and len(groups[part]) < copies and unit_of[worker] not in groups[part]:
            groups[part][unit_of[worker]] = by_worker.pop(worker)
    turn = 0
    for seat in (s for s in seats if s.worker in by_worker):
        unit = unit_of[seat.worker]
        turns = ((turn + i) % parts for i in range(parts))
        part = next((p for p in turns if len(groups[p]) < copies and unit not in groups[p]), None)
        if part is None:
            _make_room(groups, copies, unit, seat)
        else:
            groups[part][unit] = seat
            turn = part + 1
    return [list(group.values()) for group in groups]


def _make_room(groups: list[dict[int, Seat]], copies: int, unit: int, seat: Seat) -> None:
    """Put a seat into a full part and move others on, along a shortest path that ends in a part with room."""
    came: dict[int, tuple[int, int] | None] = {p: None for p, g in enumerate(groups) if unit not in g}
    queue = deque(came)
    while queue:
        part = queue.popleft()
        if len(groups[part]) < copies:
            while (step := came[part]) is not None:
                origin, moved = step
                groups[part][moved] = groups[origin].pop(moved)
                part = origin
            groups[part][unit] = seat
            return
        for moved in groups[part]:
            for to, group in enumerate(groups):
                if to not in came and moved not in group:
                    came[to] = (part, moved)
                    queue.append(to)
    raise AssertionError("a unit has more seats than there are parts")


def _copies(
    members: list[Seat], copies: int, part: int, held: Mapping[str, tuple[int, int]]
) -> tuple[Seat, ...]:
    """The members of a part by copy: who held it before keeps its place, the others fill up in order."""
    kept: dict[int, Seat] = {}
    for seat in members:
        before, copy = held.get(seat.worker, (-1, 0))
        if before == part and copy < copies:
            kept[copy] = seat
    keepers = {seat.worker for seat in kept.values()}
    rest = iter([seat for seat in members if seat.worker not in keepers])
    return tuple(kept[copy] if copy in kept else next(rest) for copy in range(copies))
