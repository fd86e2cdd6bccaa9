"""Find what an earlier controller started: its next incarnation takes it over, a stranger ends it."""

from __future__ import annotations

from contextlib import suppress

import ray
from ray.exceptions import GetTimeoutError, RayError

from elastic_train.cluster.keepers import Keepers
from elastic_train.cluster.messages import Ready, Standing
from elastic_train.cluster.names import NAMESPACE, keeper_of, worker_of
from elastic_train.cluster.perform import Performer
from elastic_train.cluster.remote import answer, named_actors


def find_workers(run: str, performer: Performer, *, verdict_s: float, adopt: bool) -> list[Standing]:
    """The run's living workers. Those of another controller's time are ended: they report to nobody."""
    living: list[Standing] = []
    for entry in named_actors():
        worker = worker_of(entry["name"], run) if entry["namespace"] == NAMESPACE else None
        if worker is None:
            continue
        with suppress(RayError, GetTimeoutError, ValueError):
            handle = ray.get_actor(entry["name"], NAMESPACE)
            if not adopt:
                ray.kill(handle, no_restart=True)
                continue
            standing: Standing = answer(handle.ping.remote(), verdict_s)
            ready: Ready = answer(handle.ready.remote(), verdict_s)
            performer.adopt(worker, handle, ready, standing.generation)
            handle.repeat.remote()
            living.append(standing)
    return living


def find_keepers(run: str, keepers: Keepers, *, adopt: bool) -> None:
    """The same for keepers: what they hold may be the newest that is left."""
    for entry in named_actors():
        node = keeper_of(entry["name"], run) if entry["namespace"] == NAMESPACE else None
        if node is None:
            continue
        with suppress(RayError, ValueError):
            handle = ray.get_actor(entry["name"], NAMESPACE)
            if adopt:
                keepers.adopt(node, handle)
            else:
                ray.kill(handle, no_restart=True)
    keepers.pair()
