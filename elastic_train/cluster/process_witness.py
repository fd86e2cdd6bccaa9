"""Find whether a silent process still lives, from its own machine and without its help.

Code that holds the GIL lets no thread of its process speak, heartbeats included. That is slow and not dead:
the process is there, and is neither stopped nor a zombie.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastic_train.cluster.nodes import Info
from elastic_train.cluster.process_stat import STATE, SYSTEM_TICKS, USER_TICKS, stat_fields
from elastic_train.cluster.ray_calls import answer, remote

log = logging.getLogger(__name__)
TITLE = b"ray::"
"""How the processes of Ray's actors begin their title: a process id may be another's by now."""

LIVING = frozenset("RSDI")
"""States in which the kernel lets a process run: running, sleeping, waiting for a device, idle."""

ANSWER_S = 8.0
"""How long a witness may take: where there is no peer store, a process has to start first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """What the kernel says of a process: its state's letter, "" if it is gone, and its CPU seconds."""

    state: str
    cpu_s: float = 0.0

    @property
    def alive(self) -> bool:
        return self.state in LIVING and self.state != ""


def sight(pid: int, *, proc: Path = Path("/proc"), title: bytes = TITLE) -> Sighting:
    """Look at a process of this machine."""
    with suppress(OSError, ValueError, IndexError):
        if (proc / str(pid) / "cmdline").read_bytes().startswith(title):
            fields = stat_fields(pid, proc=proc)
            ticks = int(fields[USER_TICKS]) + int(fields[SYSTEM_TICKS])
            return Sighting(state=fields[STATE], cpu_s=ticks / 100)
    return Sighting(state="")


def sightings(
    suspects: Mapping[str, tuple[str, int]], peer_stores: Mapping[str, Any], nodes: Mapping[str, Info]
) -> dict[str, Sighting]:
    """What was seen of each suspect, (node, pid) by worker; nothing of those whose witness gave no answer.

    A node's peer store is asked where there is one, else a task that is started there.
    """
    calls: dict[Any, str] = {}
    for worker, (node, pid) in suspects.items():
        if node not in nodes:
            continue
        if node in peer_stores:
            calls[peer_stores[node].sight.remote(pid)] = worker
        else:
            there = NodeAffinitySchedulingStrategy(nodes[node]["NodeID"], soft=False)
            calls[remote(sight, num_cpus=0).options(scheduling_strategy=there).remote(pid)] = worker
    if not calls:
        return {}
    done, _ = ray.wait(list(calls), num_returns=len(calls), timeout=ANSWER_S)
    found: dict[str, Sighting] = {}
    for call in done:
        try:
            found[calls[call]] = answer(call, 1.0)
        except RayError as error:
            log.warning("nobody could look at %s: %s", calls[call], type(error).__name__)
    return found
