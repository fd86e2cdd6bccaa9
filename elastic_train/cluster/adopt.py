"""Find what an earlier controller started: its next incarnation takes it over, a stranger ends it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import ray
from ray.exceptions import GetTimeoutError, RayError

from elastic_train.cluster.messages import Ready, Standing
from elastic_train.cluster.names import NAMESPACE, keeper_of, worker_of
from elastic_train.cluster.perform import Performer
from elastic_train.cluster.remote import answer, named_actors
from elastic_train.control.events import StepCommitted


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The workers that live on, and the steps that they know of, oldest first."""

    living: tuple[Standing, ...]
    steps: tuple[StepCommitted, ...]


def find_workers(run: str, performer: Performer, *, verdict_s: float, adopt: bool) -> Found:
    """The run's living workers. Those of another controller's time are ended: they report to nobody."""
    living: list[Standing] = []
    steps: dict[tuple[int, int], StepCommitted] = {}
    for entry in named_actors():
        worker = worker_of(entry["name"], run) if entry["namespace"] == NAMESPACE else None
        if worker is None:
            continue
        with suppress(RayError, GetTimeoutError, ValueError):
            handle = ray.get_actor(entry["name"], NAMESPACE)
            if not adopt:
                ray.kill(handle, no_restart=True)
                continue
            standing: Standing = answer(handle.ping.remote(), verdict_s)
            ready: Ready = answer(handle.ready.remote(), verdict_s)
            said: tuple[StepCommitted, ...] = answer(handle.repeat.remote(), verdict_s)
            performer.adopt(worker, handle, ready, standing.generation)
            steps |= {(report.generation, report.step): report for report in said}
            living.append(standing)
    return Found(living=tuple(living), steps=tuple(steps[key] for key in sorted(steps)))


def find_keepers(run: str, performer: Performer, *, adopt: bool) -> None:
    """The same for keepers: what they hold may be the newest that is left."""
    for entry in named_actors():
        node = keeper_of(entry["name"], run) if entry["namespace"] == NAMESPACE else None
        if node is None:
            continue
        with suppress(RayError, ValueError):
            handle = ray.get_actor(entry["name"], NAMESPACE)
            if adopt:
                performer.keepers.adopt(node, handle)
            else:
                ray.kill(handle, no_restart=True)
    performer.pair()
