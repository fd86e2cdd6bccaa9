"""Faults on demand: kill, stop, cut or drain a worker or a node of a run that trains.

They are done by a process on the machine concerned, which has this library: `kill` is SIGKILL, of a worker or
of everything that Ray started on the node; `stop` is SIGSTOP; `cut` breaks a worker's collectives and nobody
ends; `drain` gives a node notice, and ends it when that is over.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastic_train.cluster import ray_private
from elastic_train.cluster.actor_names import NAMESPACE, short, worker_of
from elastic_train.cluster.faults.own_node import kill_own_node, wake_later
from elastic_train.cluster.ray_calls import answer, named_actors, remote
from elastic_train.errors import ConfigError
from elastic_train.observe.journal_records import FormedGroup

Action = Literal["kill", "stop", "drain", "cut"]
ACTIONS = get_args(Action)
ANY = "random"
ANSWER_S = 60.0
"""How long the machine concerned may take to start a process for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A worker, or with an empty one its whole node."""

    node: str
    worker: str = ""

    def __str__(self) -> str:
        return f"{self.worker} on node {self.node}" if self.worker else f"node {self.node}"


def target(
    group: FormedGroup,
    action: Action,
    draw: random.Random,
    *,
    worker: str = "",
    rank: int = -1,
    node: str = "",
) -> Target:
    """Whom it hits: who is named, or of those that train anybody. ConfigError where there is no such one."""
    nodes = tuple(dict.fromkeys(group.nodes))
    if sum((bool(worker), rank >= 0, bool(node))) > 1:
        raise ConfigError(field="chaos", problem="takes one of --worker, --rank and --node.")
    if action == "cut" and node:
        raise ConfigError(
            field="--node", problem="cut breaks a worker's collectives.", remedy="Name a worker."
        )
    if action == "drain" or node:
        named = node or (group.nodes[_rank(group, worker, rank)] if worker or rank >= 0 else ANY)
        found = draw.choice(nodes) if named == ANY else named
        if found not in nodes:
            raise ConfigError(
                field="--node", problem=f"{found} does not train.", remedy=f"It is one of {', '.join(nodes)}."
            )
        return Target(node=found)
    place = (
        draw.randrange(len(group.workers)) if worker in ("", ANY) and rank < 0 else _rank(group, worker, rank)
    )
    return Target(worker=group.workers[place], node=group.nodes[place])


def _rank(group: FormedGroup, worker: str, rank: int) -> int:
    if worker and worker in group.workers:
        return group.workers.index(worker)
    if not worker and 0 <= rank < len(group.workers):
        return rank
    said = ", ".join(f"{name} (rank {n})" for n, name in enumerate(group.workers))
    raise ConfigError(
        field="chaos", problem="there is no such worker in the group.", remedy=f"There are {said}."
    )


def is_local() -> bool:
    """Whether all nodes of the cluster are on this machine."""
    return {node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]} == {os.uname().nodename}


def perform(action: Action, whom: Target, run: str, generation: int, *, seconds: float | None) -> str:
    """Do it to the run of that key, and say so. `seconds` are the notice of a drain, or how long a stop
    lasts. ConfigError where Ray does not find whom it is meant for.
    """
    node = _node_id(whom.node)
    if action == "drain":
        notice_s = seconds if seconds is not None else 30.0
        _started(_on(node, _leave_later, notice_s), whom)  # before: nothing starts on a node that drains
        ray_private.drain_node(node, notice_s)
        _await_gone(whom.node, notice_s)
        return f"drained {whom}, with {notice_s:.0f} s of notice"
    if not whom.worker:
        if action == "stop":
            raise ConfigError(field="--node", problem="a node can't be stopped.", remedy="Stop its workers.")
        _on(node, kill_own_node, 0.0)
        _await_gone(whom.node, 0.0)
        return f"killed {whom}"
    handle = _handle(run, whom.worker)
    if action == "cut":
        answer(handle.abort.remote(generation), ANSWER_S)
        return f"cut {whom} off its group"
    there = ray_private.actor_process(handle)
    if there is None:
        raise ConfigError(field="chaos", problem=f"{whom} has no process any more.")
    _answered(_on(node, _signal, there[1], action, seconds), whom)
    lasting = f" for {seconds:.0f} s" if action == "stop" and seconds else ""
    return f"{'killed' if action == 'kill' else 'stopped'} {whom}{lasting}"


def _signal(pid: int, action: str, seconds: float | None) -> None:
    if action == "stop" and seconds:
        wake_later(pid, seconds)
    os.kill(pid, signal.SIGKILL if action == "kill" else signal.SIGSTOP)


def _leave_later(after_s: float) -> Iterator[bool]:
    """Says that it runs, and ends its node then."""
    yield True
    kill_own_node(after_s)


def _started(words: Any, whom: Target) -> None:
    ready, _ = ray.wait([words], timeout=ANSWER_S)
    if not ready:
        raise ConfigError(field="chaos", problem=f"nothing could be started on {whom}.")


def _on(node: str, call: Callable[..., object], *arguments: Any) -> Any:
    """The answer to come of a process of that node."""
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    return remote(call, num_cpus=0, max_retries=0).options(scheduling_strategy=strategy).remote(*arguments)


def _answered(call: Any, whom: Target) -> None:
    try:
        answer(call, ANSWER_S)
    except (GetTimeoutError, RayError) as error:
        raise ConfigError(
            field="chaos", problem=f"nothing could be done to {whom}: {error}".splitlines()[0]
        ) from error


def _await_gone(node: str, notice_s: float) -> None:
    """Until Ray misses the node: who leaves sooner takes the order with it."""
    deadline = time.monotonic() + notice_s + ANSWER_S
    while time.monotonic() < deadline:
        if not any(n["Alive"] and short(n["NodeID"]) == node for n in ray.nodes()):
            return
        time.sleep(0.1)
    raise ConfigError(field="chaos", problem=f"node {node} is still there after {notice_s + ANSWER_S:.0f} s.")


def _node_id(name: str) -> str:
    found = next((n["NodeID"] for n in ray.nodes() if n["Alive"] and short(n["NodeID"]) == name), None)
    if found is None:
        raise ConfigError(field="chaos", problem=f"node {name} is not in the cluster any more.")
    return found


def _handle(run: str, worker: str) -> Any:
    for entry in named_actors():
        if entry["namespace"] == NAMESPACE and worker_of(entry["name"], run) == worker:
            return ray.get_actor(entry["name"], NAMESPACE)
    raise ConfigError(
        field="chaos", problem=f"{worker} has no process in this cluster.", remedy="Name its --address."
    )


def key_of(name: str, guess: str) -> str:
    """The key of the run of that name which is active in the cluster; `guess` decides between several."""
    suffix = "/controller"
    keys = {
        entry["name"].removesuffix(suffix)
        for entry in named_actors()
        if entry["namespace"] == NAMESPACE and entry["name"].endswith(suffix)
    }
    if guess in keys:
        return guess
    found = [key for key in keys if key.rpartition("-")[0] == name]
    if len(found) != 1:
        what = "no run" if not found else f"{len(found)} runs"
        raise ConfigError(
            field="RUN",
            problem=f"there is {what} named {name} in this cluster.",
            remedy="Name its --address.",
        )
    return found[0]
