"""Tell which workers can't come up because other actors or tasks hold what they need on their node.

Ray says of a worker that waits for room what it says of one whose process is slow to start: nothing. The
first is nobody's fault, and no reason to think ill of the node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic_train.cluster import ray_private
from elastic_train.cluster.actor_names import short
from elastic_train.cluster.controller.autoscaler_demand import one_worker
from elastic_train.cluster.controller.node_roster import Roster, place_of
from elastic_train.cluster.ray_private import LivingActor, RunningTask
from elastic_train.config import RunSpec
from elastic_train.control.events import Event, LacksRoom

LOOK_S = 5.0
NAMED = 3
"""Holders that are named; the others are counted."""


class RoomWatch:
    """`coming` lists the workers that are not up yet: the node and the actor of each, by name."""

    def __init__(
        self,
        spec: RunSpec,
        roster: Roster,
        coming: Callable[[], Mapping[str, tuple[str, Any]]],
        post: Callable[[Event], None],
        *,
        actors: Callable[[], Sequence[LivingActor]] = ray_private.living_actors,
        tasks: Callable[[str, int], Sequence[RunningTask]] = ray_private.running_tasks,
    ) -> None:
        self._need, self._roster, self._coming, self._post = one_worker(spec), roster, coming, post
        self._actors, self._tasks = actors, tasks
        self._seen: set[str] = set()  # at the last look: most workers are up by the next one
        self._told: set[str] = set()

    def look(self) -> None:
        coming = self._coming()
        late = {name: coming[name] for name in self._seen & coming.keys() - self._told}
        self._seen = set(coming)
        if not late:
            return
        actors = self._actors()
        has_process = {actor.id for actor in actors if actor.has_process}
        for name, (node, handle) in late.items():
            info = self._roster.of(node)
            if info is None or handle._actor_id.hex() in has_process:
                continue
            there: list[Holder] = [
                Holder(name=actor.name or actor.kind, resources=actor.resources)
                for actor in actors
                if actor.has_process and short(actor.node) == node
            ]
            there += [
                Holder(name=f"a task in process {task.pid}", resources=task.resources)
                for task in self._tasks(*place_of(info))
            ]
            found = holders(self._need, info["Resources"], there)
            if found:
                self._told.add(name)
                self._post(LacksRoom(at=0.0, worker=name, holders=text_of(found)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who holds resources of a node, for people."""

    name: str
    resources: Mapping[str, float]


def holders(need: Mapping[str, float], total: Mapping[str, float], there: Sequence[Holder]) -> list[Holder]:
    """Who of those on a node holds what a worker needs and does not find; nobody where it has room."""
    lacking = {
        name
        for name, amount in need.items()
        if total.get(name, 0.0) - sum(each.resources.get(name, 0.0) for each in there) < amount
    }
    return [each for each in there if lacking & each.resources.keys()]


def text_of(found: Sequence[Holder]) -> str:
    names = [each.name for each in found[:NAMED]]
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return f"{', '.join(names)}{more} {'hold' if len(found) > 1 else 'holds'} it"
