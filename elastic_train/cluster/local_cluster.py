"""A Ray cluster of several nodes on this machine: what a run uses where no cluster is given.

The head offers no CPU, each further node the CPUs of its workers, so that losing a node loses exactly its
workers.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import ray
from ray.cluster_utils import Cluster

from elastic_train.cluster import ray_private
from elastic_train.cluster.actor_names import NAMESPACE
from elastic_train.cluster.peer_store.segments import sweep
from elastic_train.cluster.process_room import check_local_room, process_room
from elastic_train.errors import ClusterNotStarted, ConfigError

OBJECT_STORE_BYTES = 150 * 2**20
END_S = 10.0  # until a process that was killed is gone, on a busy machine


def make_shared(directory: Path) -> None:
    """Make the directory as Ray does, for every user of this machine, if it isn't there."""
    if not directory.exists():
        directory.mkdir(parents=True, exist_ok=True)
        directory.chmod(0o1777)


def _short_directory() -> str:
    """A directory of our own for Ray, whose socket paths must stay below 108 characters."""
    try:
        return tempfile.mkdtemp(prefix="et-", dir="/tmp")
    except OSError as error:
        raise ConfigError(
            field="fit",
            problem=f"a local cluster keeps its sockets in /tmp, which can't be written: {error}.",
            remedy="Mount a file system there, such as by `docker run --tmpfs /tmp` where the root is "
            "read-only, or join a cluster: fit(address=...), or RAY_ADDRESS.",
        ) from error


class LocalCluster:
    """A head with 0 CPUs and `nodes` nodes of `cpus` CPUs. Use as a context manager, from the main thread.

    `gpus` are those that each node says it has; None: what Ray finds.
    """

    def __init__(
        self,
        nodes: int = 3,
        *,
        cpus: int = 1,
        gpus: int | None = None,
        object_store_bytes: int = OBJECT_STORE_BYTES,
    ) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                field="fit",
                problem="Ray starts a local cluster from the main thread alone.",
                remedy="Call fit() there, or join a cluster: fit(address=...), or ray.init() before.",
            )
        check_local_room(nodes, process_room())
        self._cpus, self._gpus, self._object_store_bytes = cpus, gpus, object_store_bytes
        self._temporary = _short_directory()
        self.nodes: list[Any] = []
        self.cluster = Cluster()
        try:
            make_shared(ray_private.default_directory())
            self.cluster.add_node(
                num_cpus=0,
                include_dashboard=False,
                object_store_memory=object_store_bytes,
                temp_dir=self._temporary,
            )
            for _ in range(nodes):
                self.add_node()
            ray.init(address=self.cluster.address, namespace=NAMESPACE, log_to_driver=False, logging_level=30)
        except Exception as error:  # Ray's own: of any class, and what it says of itself differs
            self.close()
            raise ClusterNotStarted(cause=f"{type(error).__name__}: {error}".splitlines()[0]) from error
        except BaseException:
            self.close()
            raise

    def add_node(self, cpus: int | None = None) -> str:
        """Start a node and return its id."""
        said: dict[str, Any] = {} if self._gpus is None else {"num_gpus": self._gpus}
        node = self.cluster.add_node(
            num_cpus=self._cpus if cpus is None else cpus,
            object_store_memory=self._object_store_bytes,
            **said,
        )
        self.nodes.append(node)
        return node.node_id

    def kill_node(self, node_id: str) -> list[int]:
        """SIGKILL everything of a node: its workers first, then raylet and agents. Returns the ids killed."""
        node = next(n for n in self.nodes if n.node_id == node_id)
        pids = self.processes(node_id)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.nodes.remove(node)
        return pids

    def processes(self, node_id: str) -> list[int]:
        """Ids of a node's processes, workers before the raylet that is their parent."""
        node = next(n for n in self.nodes if n.node_id == node_id)
        own = ray_private.node_processes(node)
        children = [
            child.pid
            for pid in own
            if psutil.pid_exists(pid)
            for child in psutil.Process(pid).children(recursive=True)
        ]
        return list(dict.fromkeys([*children, *own]))

    def close(self) -> None:
        self.nodes.clear()  # whoever still means to kill one finds none, and not another's process
        if ray.is_initialized():
            ray.shutdown()
        self.cluster.shutdown()
        self._end_rest()
        shutil.rmtree(self._temporary, ignore_errors=True)
        sweep()  # peer stores that were killed left their segments

    def _end_rest(self) -> None:
        """What a node that failed to start has begun, unknown to Ray: it all names our directory."""
        ended: list[psutil.Process] = []
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                if any(self._temporary in word for word in process.cmdline()):
                    process.kill()
                    ended.append(process)
        psutil.wait_procs(ended, timeout=END_S)

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
