"""Compare what replicas hold, so that a bit that flipped in one of them is found."""

from __future__ import annotations

from collections import defaultdict

import torch.distributed as dist

from elastic_train.errors import ReplicasDiffer
from elastic_train.geometry.digest import MASK
from elastic_train.recovery.corruption import judge
from elastic_train.train.state.live_fragments import parts
from elastic_train.train.state.shards import Shards
from elastic_train.train.state.tensor_digest import tensor_digest


def compare_replicas(shards: Shards, agreed: int) -> None:
    """All ranks call it at a step boundary. ReplicasDiffer on each of them where some hold other bits.

    `agreed` is the last step at which they did not. Shards that may be wrong are torn: no evidence.
    """
    assert shards.step is not None
    step, world = shards.step, shards.plan.world_size
    if world < 2:
        return
    reported: list[tuple[int, dict[str, int]]] = [(0, {})] * world
    dist.all_gather_object(reported, (shards.rank, _own(shards)))
    verdict = judge(dict(reported))
    suspects = (*verdict.wrong, *verdict.doubtful)
    if not suspects:
        return
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
