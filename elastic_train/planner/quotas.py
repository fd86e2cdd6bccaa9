"""How many micro-batches each data-parallel index computes, where workers are of uneven speed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import islice

from elastic_train.planner.plan import Mesh, WorkerSlot, even_shares


def quotas(micro_batches: int, speeds: Sequence[float], least: int = 1) -> tuple[int, ...]:
    """Counts that sum to `micro_batches`, at least `least` each, with the earliest end of the last.

    Starts from the largest remainder of the proportional shares, then moves one from who ends last while that
    helps. `len(speeds) * least` must not exceed `micro_batches`.
    """
    assert len(speeds) * least <= micro_batches
    total = sum(speeds)
    exact = [micro_batches * speed / total for speed in speeds]
    counts = [max(least, int(share)) for share in exact]
    left = micro_batches - sum(counts)
    for i in sorted(range(len(speeds)), key=lambda i: (int(exact[i]) - exact[i], i))[: max(0, left)]:
        counts[i] += 1
    while sum(counts) > micro_batches:  # `least` lifted some
        above = [i for i, n in enumerate(counts) if n > least]
        counts[max(above, key=lambda i: counts[i] / speeds[i])] -= 1
    while True:
        last = max(range(len(counts)), key=lambda i: (counts[i] / speeds[i], -i))
        first = min(range(len(counts)), key=lambda i: ((counts[i] + 1) / speeds[i], i))
        if counts[last] <= least or (counts[first] + 1) / speeds[first] >= counts[last] / speeds[last]:
            return tuple(counts)
        counts[last] -= 1
        counts[first] += 1


def speeds_of(mesh: Mesh, worker_slots: Sequence[WorkerSlot]) -> tuple[float, ...]:
    """By data-parallel index, the speed of its slowest rank: the others wait for it."""
    slowest = [float("inf")] * mesh.dp
    for rank, slot in enumerate(worker_slots):
        index = mesh.dp_index(rank)
        slowest[index] = min(slowest[index], slot.speed)
    return tuple(slowest)


def shares_by_speed(
    micro_batches: int, mesh: Mesh, ranks: Sequence[WorkerSlot], *, least: int = 1
) -> tuple[tuple[int, ...], ...]:
    """Contiguous shares of the micro-batches, in proportion to the speed of the workers on each index.

    Even ones where speeds are, and where parameters are cut: there every rank runs as many rounds as the
    longest share has, because each takes part in gathering them.
    """
    speeds = speeds_of(mesh, ranks)
    if mesh.dp_shard > 1 or len(set(speeds)) == 1:
        return even_shares(micro_batches, mesh.dp)
    counts = quotas(micro_batches, speeds, least)
    starts = [sum(counts[:i]) for i in range(len(counts))]
    return tuple(tuple(range(start, start + n)) for start, n in zip(starts, counts, strict=True))


def shares_without(shares: Sequence[Sequence[int]], absent: Collection[int]) -> tuple[tuple[int, ...], ...]:
    """Contiguous shares where the data-parallel indices in `absent` compute nothing, and the others what
    they have in proportion to their shares.
    """
    there = [i for i in range(len(shares)) if i not in absent]
    total = sum(map(len, shares))
    counts = dict(zip(there, quotas(total, [max(len(shares[i]), 1) for i in there], 0), strict=True))
    starts = [sum(counts.get(j, 0) for j in range(i)) for i in range(len(shares))]
    return tuple(tuple(range(start, start + counts.get(i, 0))) for i, start in enumerate(starts))


def shares_left(
    shares: Sequence[Sequence[int]], computed: Mapping[int, Sequence[int]], absent: Collection[int]
) -> tuple[tuple[int, ...], ...]:
    """What each data-parallel index still runs of `shares`, where `computed`, by index, is there already.

    Everybody goes on with its own share where what is there is of it and nobody is `absent`: sums keep their
    order then. Else those who are there share what is left in proportion to their shares.
    """
    done = {i for found in computed.values() for i in found}
    if not absent and all(set(found) <= set(shares[index]) for index, found in computed.items()):
        return tuple(tuple(i for i in share if i not in done) for share in shares)
    left = sorted({i for share in shares for i in share} - done)
    there = [index for index in range(len(shares)) if index not in absent]
    counts = quotas(len(left), [max(len(shares[index]), 1) for index in there], 0)
    given = iter(left)
    parts = {index: tuple(islice(given, n)) for index, n in zip(there, counts, strict=True)}
    return tuple(parts.get(index, ()) for index in range(len(shares)))


def slowest_end(shares: Sequence[Sequence[int]], mesh: Mesh, ranks: Sequence[WorkerSlot]) -> float:
    """When the last data-parallel index has run its share, in times of a micro-batch at speed 1."""
    most = max(len(share) for share in shares)
    lengths = [most] * mesh.dp if mesh.dp_shard > 1 else [len(share) for share in shares]
    return max(n / speed for n, speed in zip(lengths, speeds_of(mesh, ranks), strict=True))
