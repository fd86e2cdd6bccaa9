"""Ask Ray's autoscaler for the workers that the runs of a cluster could use. Nothing waits for an answer.

A request names the whole of what is wanted, holds nodes that are there, and is global to the cluster: the
last one that anybody makes counts. So each run notes its own request where all runs of the cluster see it,
and asks for the sum; it asks again from time to time, since others may have asked for theirs alone. Without
an autoscaler it changes nothing.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import Protocol

import ray
from ray.autoscaler.sdk import request_resources
from ray.exceptions import RayError

from elastic_train.cluster import ray_private
from elastic_train.cluster.actor_names import NAMESPACE, controller_name
from elastic_train.cluster.label_selectors import selected
from elastic_train.config import RunSpec

log = logging.getLogger(__name__)
ASK_AGAIN_S = 20.0
Bundles = list[dict[str, float]]
Labels = list[dict[str, str]]
"""The labels that the node of each bundle needs."""


def bundles(spec: RunSpec) -> Bundles:
    """One per worker of the largest group and per standby."""
    return [one_worker(spec)] * (spec.max_workers + spec.standby)


def one_worker(spec: RunSpec) -> dict[str, float]:
    """What a worker needs, in Ray's words: its kind of accelerator is a resource of nodes that have it."""
    needed = {"CPU": spec.cpus_per_worker, "GPU": spec.gpus_per_worker}
    if spec.accelerator is not None:
        needed[f"accelerator_type:{spec.accelerator}"] = 0.001
    return {name: amount for name, amount in needed.items() if amount}


def slots_of(spec: RunSpec, resources: Mapping[str, float], labels: Mapping[str, str] | None = None) -> int:
    """Workers that a node of these resources and labels has room for."""
    if not selected(labels or {}, spec.labels):
        return 0
    room = min(int(resources.get(name, 0.0) / amount) for name, amount in one_worker(spec).items())
    return min(room, 1) if spec.placement == "STRICT_SPREAD" else room


def request_bundles(wanted: Bundles, labels: Labels) -> None:
    request_resources(bundles=wanted, bundle_label_selectors=labels if any(labels) else None)


class Notes(Protocol):
    """Small values by key that all processes of a cluster share."""

    def put(self, key: str, value: bytes) -> None: ...
    def delete(self, key: str) -> None: ...
    def all(self) -> Mapping[str, bytes]: ...


class Demand:
    """One run's request among those of its cluster. A run whose controller is gone asks for nothing."""

    def __init__(
        self,
        run: str,
        spec: RunSpec,
        *,
        notes: Notes | None = None,
        request: Callable[[Bundles, Labels], None] = request_bundles,
        is_there: Callable[[str], bool] | None = None,
    ) -> None:
        self._run, self._spec = run, spec
        self._notes: Notes = notes if notes is not None else ray_private.ClusterNotes("elastic_train/demand")
        self._request, self._is_there = request, is_there or has_controller

    def ask(self) -> None:
        """Ask for what all runs of the cluster could use."""
        if self._spec.ask_autoscaler:
            request = {
                "each": one_worker(self._spec),
                "count": len(bundles(self._spec)),
                "labels": dict(self._spec.labels),
            }
            self._notes.put(self._run, json.dumps(request).encode())
            self._ask_for_all()

    def release(self) -> None:
        """Let the autoscaler take back what only this run wanted."""
        if self._spec.ask_autoscaler:
            self._notes.delete(self._run)
            self._ask_for_all()

    def _ask_for_all(self) -> None:
        wanted: Bundles = []
        labels: Labels = []
        for run, value in sorted(self._notes.all().items()):
            if run != self._run and not self._is_there(run):
                self._notes.delete(run)
                continue
            request = json.loads(value)
            wanted += [request["each"]] * request["count"]
            labels += [request["labels"]] * request["count"]
        try:
            self._request(wanted, labels)
        except (RayError, RuntimeError) as error:
            log.warning("the autoscaler was not asked: %s", error)


def has_controller(run: str) -> bool:
    """Whether a run is at work on this cluster."""
    try:
        ray.get_actor(controller_name(run), NAMESPACE)
    except ValueError:
        return False
    return True
