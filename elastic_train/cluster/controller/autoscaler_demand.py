"""Tells Ray's autoscaler how many workers the run could use. Nothing ever waits for an answer.

A request names the whole of what is wanted, holds nodes that are there, and is global to the cluster: the
last one that anybody makes counts. Without an autoscaler it changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from ray.autoscaler.sdk import request_resources
from ray.exceptions import RayError

from elastic_train.cluster.labels import selected
from elastic_train.config import RunSpec

log = logging.getLogger(__name__)


def bundles(spec: RunSpec) -> list[dict[str, float]]:
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


def ask(spec: RunSpec) -> None:
    _request(bundles(spec), dict(spec.labels))


def release() -> None:
    """Let the autoscaler take idle nodes back."""
    _request([], {})


def _request(wanted: list[dict[str, float]], labels: dict[str, str]) -> None:
    try:
        request_resources(bundles=wanted, bundle_label_selectors=[labels] * len(wanted) if labels else None)
    except (RayError, RuntimeError) as error:
        log.warning("the autoscaler was not asked: %s", error)
