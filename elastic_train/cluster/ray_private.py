"""The private parts of Ray that we rely on, so that an upgrade has one place to look at.

Those of Ray Train are in `ray_train_private`.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import ray
from ray._common.utils import get_default_ray_temp_dir, get_ray_address_file
from ray._private import state
from ray._private.internal_api import node_stats
from ray._private.ray_logging import stdout_deduplicator
from ray._private.services import find_gcs_addresses
from ray._raylet import GcsClient  # pyright: ignore[reportAttributeAccessIssue]
from ray.core.generated import autoscaler_pb2, gcs_pb2
from ray.experimental import internal_kv


def leave_deaths_to_the_run() -> None:
    """Leave out the paragraph that Ray prints for each worker that dies: a run has a clause for it.

    Where a person chose what Ray leaves out, or that it leaves out nothing, it stays as chosen.
    """
    if stdout_deduplicator.skip_re is None:
        stdout_deduplicator.skip_re = re.compile("^A worker died or was killed while executing a task")


def local_clusters() -> list[str]:
    """Addresses of the Ray clusters whose head is on this machine."""
    return sorted(find_gcs_addresses())


def draining_nodes() -> dict[str, float]:
    """Node id -> seconds until its drain deadline; a large number where it has none.

    `ray.nodes()` and the public pubsub don't show a drain; this call sees it within milliseconds.
    """
    now_ms = time.time() * 1000  # noqa: TID251 - Ray gives the deadline as wall-clock time
    return {
        node: (deadline_ms - now_ms) / 1000 if deadline_ms else 1e9
        for node, deadline_ms in state.state.get_draining_nodes().items()
    }


def this_node() -> str:
    return ray.get_runtime_context().get_node_id()


def actor_process(handle: Any) -> tuple[str, int] | None:
    """The node and the process id of an actor; None where it has no process."""
    info = state.state.actor_table(handle._actor_id.hex())
    node, pid = info.get("Address", {}).get("NodeID"), info.get("Pid")
    return (node, pid) if node and pid and info.get("State") == "ALIVE" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LivingActor:
    """An actor that is not dead. `node`: where it is, or is to be. `has_process`: it holds its resources."""

    id: str
    name: str  # empty where it was given none
    kind: str  # its class
    node: str
    has_process: bool
    resources: Mapping[str, float]


def living_actors() -> list[LivingActor]:
    """The actors of the cluster, of all jobs."""
    accessor = state.state._connect_and_get_accessor()
    found: list[LivingActor] = []
    for there in ("ALIVE", "PENDING_CREATION"):
        for entry in accessor.get_actor_table(None, there):
            actor = gcs_pb2.ActorTableData.FromString(entry)  # pyright: ignore[reportAttributeAccessIssue]
            found.append(
                LivingActor(
                    id=actor.actor_id.hex(),
                    name=actor.name,
                    kind=actor.class_name,
                    node=actor.address.node_id.hex(),
                    has_process=bool(actor.address.worker_id.strip(b"\xff")),
                    resources=dict(actor.required_resources),
                )
            )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningTask:
    """A process that runs plain tasks, which are no actor's."""

    pid: int
    resources: Mapping[str, float]


def running_tasks(address: str, port: int) -> list[RunningTask]:
    """Those on the node whose raylet listens there; none where it doesn't answer."""
    try:
        processes = node_stats(address, port, include_memory_info=False).core_workers_stats
    except grpc.RpcError:
        return []
    return [
        RunningTask(
            pid=process.pid,
            resources={
                name: sum(slot.allocation for slot in held.resource_slots)
                for name, held in process.used_resources.items()
            },
        )
        for process in processes
        if process.num_running_tasks and process.used_resources and not process.actor_id.strip(b"\xff")
    ]


def node_processes(cluster_node: Any) -> list[int]:
    """Ids of the processes that a `ray.cluster_utils` node started: raylet, agents, monitors."""
    return [p.process.pid for group in cluster_node.all_processes.values() for p in group]


def default_directory() -> Path:
    """Where `Cluster` writes the address of the newest cluster; it expects the directory to exist."""
    return Path(get_default_ray_temp_dir())


def address_can_be_noted() -> bool:
    """Whether `Cluster` may write that file. It fails where the directory, or the file, is another user's."""
    file = Path(get_ray_address_file(None))
    there = next(path for path in (file, *file.parents) if path.exists())
    return os.access(there, os.W_OK)


def spilled(address: str, port: int) -> int:
    """Bytes that the raylet there has moved from its object store to disk; 0 where it doesn't answer."""
    try:
        return int(node_stats(address, port, include_memory_info=False).store_stats.spilled_bytes_total)
    except grpc.RpcError:
        return 0


def drain_node(node: str, notice_s: float) -> None:
    """Give a node notice, as a cloud's spot interruption does."""
    client = GcsClient(address=ray.get_runtime_context().gcs_address)
    reason = autoscaler_pb2.DrainNodeReason.Value(  # pyright: ignore[reportAttributeAccessIssue]
        "DRAIN_NODE_REASON_PREEMPTION"
    )
    deadline_ms = int((time.time() + notice_s) * 1000)  # noqa: TID251 - as Ray wants it
    client.drain_node(node, reason, "notice", deadline_ms)


class ClusterNotes:
    """Small values by key in the cluster's own store, which lives as long as its head."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace

    def put(self, key: str, value: bytes) -> None:
        internal_kv._internal_kv_put(key, value, overwrite=True, namespace=self._namespace)

    def delete(self, key: str) -> None:
        internal_kv._internal_kv_del(key, namespace=self._namespace)

    def all(self) -> dict[str, bytes]:
        keys = internal_kv._internal_kv_list("", namespace=self._namespace) or ()
        found = {key: internal_kv._internal_kv_get(key, namespace=self._namespace) for key in keys}
        return {key.decode(): value for key, value in found.items() if value is not None}
