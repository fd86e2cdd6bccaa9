"""Take over a run that is submitted again while its old controller may still be alive.

It is refused while somebody drives it, and taken over where its driver is gone: two never share a run.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from elastic_train.cluster.actor_names import NAMESPACE, controller_name, peer_store_of
from elastic_train.cluster.controller.autoscaler_demand import Demand
from elastic_train.cluster.peer_store import segments
from elastic_train.cluster.ray_calls import answer, named_actors
from elastic_train.cluster.run_updates import Driven
from elastic_train.config import RunSpec
from elastic_train.errors import LeaseHeld

log = logging.getLogger(__name__)
ANSWER_S = 30.0  # a controller may just be starting, on a machine that is busy with the start
ASK_S = 0.5
LET_GO_S = 0.4  # what a peer store needs to remove its files


def take_over(run: str, spec: RunSpec) -> None:
    """Leave no controller of the run on this cluster. LeaseHeld as soon as its driver shows life."""
    try:
        old = ray.get_actor(controller_name(run), NAMESPACE)
    except ValueError:
        return
    with suppress(RayError, GetTimeoutError):  # one that doesn't answer is ended as it is
        _outlast_driver(old, spec)
        _end(old, spec)
    ray.kill(old, no_restart=True)
    sweep(run)


def sweep(run: str, *, within_s: float = LET_GO_S) -> None:
    """End every actor of a run that is left on this cluster. Peer stores get a moment to let go of their
    memory.
    """
    found: dict[str, Any] = {}
    for entry in named_actors():
        if entry["namespace"] == NAMESPACE and entry["name"].startswith(f"{run}/"):
            with suppress(ValueError):
                found[entry["name"]] = ray.get_actor(entry["name"], NAMESPACE)
    leaving = [handle.stop.remote() for name, handle in found.items() if peer_store_of(name, run) is not None]
    for name, handle in found.items():
        if peer_store_of(name, run) is None:
            _kill(handle)
    if leaving:
        ray.wait(leaving, num_returns=len(leaving), timeout=within_s)
    for name, handle in found.items():
        if peer_store_of(name, run) is not None:
            _kill(handle)


def put_back(run: str, spec: RunSpec) -> None:
    """What a run has outside of its processes, where its controller had no time for it: nothing is left of
    it.
    """
    sweep(run)
    segments.sweep()
    Demand(run, spec).release()


def _kill(handle: Any) -> None:
    with suppress(RayError):
        ray.kill(handle, no_restart=True)


def _outlast_driver(old: Any, spec: RunSpec) -> None:
    silent_s = 0.0
    while True:
        driven: Driven = answer(old.driven.remote(), ANSWER_S)
        if driven.ended:
            return
        if driven.silent_s < silent_s:
            raise LeaseHeld(run=spec.name, holder=driven.driver, age_s=driven.silent_s)
        if driven.silent_s > spec.timing.lease_s:
            return
        silent_s = driven.silent_s
        threading.Event().wait(ASK_S)


def _end(old: Any, spec: RunSpec) -> None:
    """Let the old controller stop its group with a checkpoint. It is waited for as long as it answers: each
    of its phases has a deadline of its own, and what only its workers hold would be lost with them.
    """
    old.stop.remote("its driver is gone and the run was submitted again", patient=True)
    began, said = time.monotonic(), 0.0
    while not answer(old.driven.remote(), ANSWER_S).ended:
        if time.monotonic() - began > said:
            log.info("the controller that %s had left stops with a checkpoint, since %.0f s", spec.name, said)
            said += spec.timing.settle_s
        threading.Event().wait(ASK_S)
