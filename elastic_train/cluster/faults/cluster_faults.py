"""Perform a fault schedule on a local cluster: the faults that a worker cannot do to itself.

Nodes are called n0, n1, ... in the order in which the cluster started them; AddNode names the next ones.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray

from elastic_train.cluster import ray_private
from elastic_train.cluster.actor_names import short
from elastic_train.cluster.faults.fault_injector import claim
from elastic_train.cluster.local_cluster import LocalCluster
from elastic_train.cluster.run_updates import RunUpdate
from elastic_train.control.events import StepCommitted
from elastic_train.control.fault_schedule import (
    AddNode,
    DamageCheckpoint,
    DrainNode,
    FailStorage,
    Fault,
    FaultSchedule,
    KillController,
    KillNode,
)
from elastic_train.storage.store import Store


class Chaos:
    """`labels` is for the workers; `on_update` belongs to the driver's loop, on the main thread."""

    def __init__(self, cluster: LocalCluster, schedule: FaultSchedule, say: Callable[[str], None]) -> None:
        self.schedule = schedule
        self._cluster, self._say = cluster, say
        self._nodes = {f"n{i}": node.node_id for i, node in enumerate(cluster.nodes)}
        self.labels = {short(node): label for label, node in self._nodes.items()}
        self._initial = frozenset(self._nodes)
        self._later = [(n, f) for n, f in enumerate(schedule.faults) if self._ours(f)]

    def on_update(self, update: RunUpdate, controller: Any, store: Store) -> None:
        """Do what is due by the steps that were committed."""
        steps = [r.event.step for r in update.records if isinstance(r.event, StepCommitted)]
        for number, fault in list(self._later):
            # The step before the moment is committed: the moment's own step is being run now.
            if steps and max(steps) >= fault.when.step - 1:
                self._later.remove((number, fault))
                if claim(store, number):
                    self._say(f"chaos: {fault}")
                    self._do(fault, controller, store)

    def _ours(self, fault: Fault) -> bool:
        match fault:
            case KillNode(node=node):
                return node not in self._initial  # its workers don't know their label
            case AddNode() | DrainNode() | KillController() | FailStorage() | DamageCheckpoint():
                return True
            case _:
                return False

    def _do(self, fault: Fault, controller: Any, store: Store) -> None:
        match fault:
            case KillNode(node=node):
                with suppress(StopIteration, KeyError):  # it went some other way
                    self._cluster.kill_node(self._nodes[node])
            case AddNode(node=node, slots=slots):
                self._nodes[node] = self._cluster.add_node(cpus=slots)
            case DrainNode(node=node, notice_s=notice_s):
                target = self._nodes[node]
                ray_private.drain_node(target, notice_s)
                threading.Timer(notice_s, self._leave, (target,)).start()
            case KillController():
                os.kill(ray.get(controller.pid.remote(), timeout=60), signal.SIGKILL)
            case DamageCheckpoint():
                _damage(Path(store.url))
            case FailStorage(seconds=seconds):
                _block(Path(store.url) / "checkpoints", seconds)
            case _:
                raise AssertionError(fault)

    def _leave(self, node: str) -> None:
        with suppress(StopIteration):
            self._cluster.kill_node(node)


def _damage(run: Path) -> None:
    """Flip a bit in the middle of the newest checkpoint's largest file."""
    newest = max((run / "checkpoints").iterdir())
    file = max(newest.glob("*.safetensors"), key=lambda f: f.stat().st_size)
    with file.open("r+b") as data:
        data.seek(file.stat().st_size // 2)
        byte = data.read(1)
        data.seek(-1, os.SEEK_CUR)
        data.write(bytes([byte[0] ^ 1]))


def _block(directory: Path, seconds: float) -> None:
    """Let every write below a directory fail for a while: a file stands in its place."""
    aside = directory.with_name(f"{directory.name}.aside")
    directory.mkdir(parents=True, exist_ok=True)
    directory.rename(aside)
    directory.touch()

    def restore() -> None:
        directory.unlink()
        aside.rename(directory)

    threading.Timer(seconds, restore).start()
