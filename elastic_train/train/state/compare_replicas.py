"""Compare digests of replicas to find silent corruption."""

from __future__ import annotations

import math
import time
from collections import defaultdict

import torch.distributed as dist

from elastic_train.errors import ReplicasDiffer
from elastic_train.geometry.digest import MASK
from elastic_train.recovery.replica_corruption import judge
from elastic_train.train.state.live_fragments import parts
from elastic_train.train.state.shards import Shards
from elastic_train.train.state.tensor_digest import tensor_digest

SHARE = 0.005
"""Of the time of a run, what comparing may take where nobody says how often to do it."""


def pause_until_next(cost_s: float, step_s: float) -> int:
    """How many steps to leave out."""
    return max(1, math.ceil(cost_s / (SHARE * step_s))) if step_s > 0 else 1


def compare_replicas(shards: Shards, agreed: int, step_s: float = 0.0) -> int:
    """All ranks call it at a step boundary. ReplicasDiffer on each of them where some hold other bits.

    Returns after how many steps of `step_s` seconds to do it again, the same number on each. `agreed` is the
    last step at which they did not differ. Shards that may be wrong are torn: no evidence.
    """
    assert shards.step is not None
    step, world = shards.step, shards.plan.world_size
    if world < 2:
        return 1
    began = time.monotonic()
    own = _own(shards)
    own_report = (shards.rank, own, time.monotonic() - began, step_s)
    reported: list[tuple[int, dict[str, int], float, float]] = [own_report] * world
    dist.all_gather_object(reported, own_report)
    verdict = judge({rank: digests for rank, digests, _, _ in reported}, shards.late)
    suspects = (*verdict.wrong, *verdict.doubtful)
    with shards.lock:
        shards.late, shards.proved = frozenset(), True
    if not suspects:
        return pause_until_next(max(r[2] for r in reported), min(r[3] for r in reported))
    if shards.rank in suspects:
        with shards.lock:
            shards.step = None
    raise ReplicasDiffer(
        step=step,
        agreed=agreed,
        wrong=tuple(_name(shards, rank) for rank in verdict.wrong),
        doubtful=tuple(_name(shards, rank) for rank in verdict.doubtful),
    )


def _own(shards: Shards) -> dict[str, int]:
    """The digest of everything that is held by the same other ranks too."""
    at = shards.place.mesh.coordinate(shards.rank)
    found: defaultdict[str, int] = defaultdict(int)
    for part in parts(shards):
        if part.replica.count > 1:
            tied = any(axis not in at for axis in part.replica.axes)  # over stages
            cut = [
                f"{a} {i}" for a, i in at.items() if a not in part.replica.axes and not (tied and a == "pp")
            ]
            digest = tensor_digest(
                part.view, tensor=part.tensor, state=part.state, box=part.box, shape=part.shape
            )
            name = f"{part.replica.axes} at {', '.join(cut)}"
            found[name] = (found[name] + digest) & MASK
    return dict(found)


def _name(shards: Shards, rank: int) -> str:
    return f"{shards.plan.workers[rank]} (rank {rank}, node {shards.plan.nodes[rank]})"
