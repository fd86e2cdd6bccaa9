"""Preflight: try every node before the first step: the run's storage from there, and room for processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastic_train.cluster.process_room import process_room, too_narrow
from elastic_train.cluster.ray_calls import answer, connect, remote
from elastic_train.errors import StorageError, StorageUnavailable
from elastic_train.storage.fsspec_store import open_store
from elastic_train.storage.preflight import Token, probe, see


@dataclass(frozen=True, slots=True)
class Problems:
    """What keeps a run from using a node, by node: its storage from there, or too little room to begin."""

    storage: dict[str, str] = field(default_factory=dict[str, str])
    room: dict[str, str] = field(default_factory=dict[str, str])


def hosts() -> dict[str, str]:
    """A living node of each machine of the cluster. Containers may share their host's address, and be narrow
    by themselves: they are told apart by their names.
    """
    living = [n for n in ray.nodes() if n["Alive"]]
    return {f"{n['NodeManagerAddress']} ({n['NodeManagerHostname']})": n["NodeID"] for n in living}


def nodes() -> dict[str, str]:
    """The living nodes of the cluster, by what a person would call them."""
    return {f"{n['NodeManagerHostname']} ({n['NodeID'][:8]})": n["NodeID"] for n in ray.nodes() if n["Alive"]}


def problems_of(
    url: str, token: Token, nodes: Mapping[str, str], *, within_s: float, trouble_raises: bool = False
) -> Problems:
    """What keeps a run with its storage at a URL from using the nodes.

    Each node reads the token that was written elsewhere, and writes, creates, reads back and deletes its own;
    and more processes can begin there. Trouble that may pass is told as any other, or with `trouble_raises`
    as the StorageUnavailable that it is.
    """
    calls = {
        name: remote(_try, num_cpus=0)
        .options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
        .remote(url, token)
        for name, node in nodes.items()
    }
    found = Problems()
    for name, call in calls.items():
        try:
            narrow = answer(call, within_s)  # a process has to start there first
            if narrow is not None:
                found.room[name] = narrow
        except StorageError as error:
            if trouble_raises and isinstance(error, StorageUnavailable):
                raise
            found.storage[name] = str(error)
        except (RayError, GetTimeoutError) as error:
            found.storage[name] = f"it did not answer: {type(error).__name__}"
    return found


def try_everywhere(url: str, token: Token, *, address: str, within_s: float) -> dict[str, str | None]:
    """Every node of the cluster at an address, with what is wrong there or None."""
    connect(address, logging_level=30)
    try:
        names = nodes()
        problems = problems_of(url, token, names, within_s=within_s)
        told = problems.room | problems.storage
        return {name: told.get(name) for name in sorted(names)}
    finally:
        ray.shutdown()


def _try(url: str, token: Token) -> str | None:
    store = open_store(url)
    see(store, token)
    store.delete([probe(store).path])
    return too_narrow(process_room())
