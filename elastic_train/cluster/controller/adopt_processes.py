"""Find actors that an earlier controller started, and adopt or end them."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from elastic_train.cluster.actor_names import NAMESPACE, peer_store_of, short, worker_of
from elastic_train.cluster.controller.node_roster import Roster
from elastic_train.cluster.controller.performer import Performer
from elastic_train.cluster.messages import Heartbeat
from elastic_train.cluster.process_witness import sightings
from elastic_train.cluster.ray_calls import answer, named_actors
from elastic_train.cluster.ray_private import actor_process
from elastic_train.cluster.reported_events import each_once
from elastic_train.config import Timing
from elastic_train.control.events import StepCommitted


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The workers that live on, and the steps that they know of, oldest first. `silent` ones said nothing."""

    living: tuple[Heartbeat, ...]
    steps: tuple[StepCommitted, ...]
    silent: tuple[str, ...]


def find_workers(run: str, performer: Performer, roster: Roster, *, timing: Timing, adopt: bool) -> Found:
    """The run's living workers. Those of another controller's time are ended: they report to nobody."""
    handles: dict[str, Any] = {}
    for entry in named_actors():
        worker = worker_of(entry["name"], run) if entry["namespace"] == NAMESPACE else None
        if worker is None:
            continue
        with suppress(RayError, ValueError):
            handle = ray.get_actor(entry["name"], NAMESPACE)
            if adopt:
                handles[worker] = handle
            else:
                ray.kill(handle, no_restart=True)
    return _heard(handles, performer, roster, timing)


def _heard(handles: dict[str, Any], performer: Performer, roster: Roster, timing: Timing) -> Found:
    """Ask all of them at once, and wait as long as answers come, or as processes that say nothing are seen to
    live and a final report may take.
    """
    verdict_s, give_up = timing.verdict_s, time.monotonic() + timing.settle_s
    calls = {w: (h.ping.remote(), h.ready.remote(), h.repeat.remote()) for w, h in handles.items()}
    pending = [call for three in calls.values() for call in three]
    while pending:
        came, pending = ray.wait(pending, num_returns=1, timeout=verdict_s)
        mute = {worker: handles[worker] for worker, three in calls.items() if three[0] in pending}
        if not came and not (time.monotonic() < give_up and _seen(mute, performer, roster)):
            break
    living: list[Heartbeat] = []
    reports: list[StepCommitted] = []
    silent: list[str] = []
    for worker, three in calls.items():
        try:
            if any(call in pending for call in three):
                raise TimeoutError
            heartbeat, ready, said = (answer(call, verdict_s) for call in three)
        except (TimeoutError, RayTaskError):  # it is there: still loading its job, say, or with an error
            performer.workers.meet(worker, handles[worker])
            silent.append(worker)
        except RayError:
            continue
        else:
            performer.adopt(worker, handles[worker], ready, heartbeat.generation)
            reports += said
            living.append(heartbeat)
    return Found(living=tuple(living), steps=each_once(reports), silent=tuple(silent))


def _seen(mute: dict[str, Any], performer: Performer, roster: Roster) -> bool:
    """Whether a process that says nothing, not even that it is starting, is seen to live."""
    places = {worker: actor_process(handle) for worker, handle in mute.items()}
    there = {worker: (short(place[0]), place[1]) for worker, place in places.items() if place is not None}
    accept = roster.accept_now({node for node, _ in there.values()})
    suspects = {worker: place for worker, place in there.items() if place[0] in accept}
    seen = sightings(suspects, performer.peer_stores.handles(), roster.living())
    return any(sighting.alive for sighting in seen.values())


def find_peer_stores(run: str, performer: Performer, *, adopt: bool) -> None:
    """The same for peer stores: what they hold may be the newest that is left."""
    for entry in named_actors():
        node = peer_store_of(entry["name"], run) if entry["namespace"] == NAMESPACE else None
        if node is None:
            continue
        with suppress(RayError, ValueError):
            handle = ray.get_actor(entry["name"], NAMESPACE)
            if adopt:
                performer.peer_stores.adopt(node, handle)
            else:
                ray.kill(handle, no_restart=True)
