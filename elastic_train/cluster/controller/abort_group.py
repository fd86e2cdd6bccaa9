"""Abort a generation's workers, and find those that cannot be reached."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.exceptions import RayError

from elastic_train.cluster.controller.node_roster import Roster
from elastic_train.cluster.messages import Ready
from elastic_train.cluster.process_witness import sightings
from elastic_train.cluster.ray_calls import answer
from elastic_train.control.events import Cause

Lost = Callable[[str, Cause], None]


def abort(
    generation: int,
    workers: Mapping[str, tuple[Any, Ready]],
    *,
    roster: Roster,
    peer_stores: Mapping[str, Any],
    lost: Lost,
    verdict_s: float,
) -> None:
    """All of them at once. One that gives no answer is lost if its machine says so too: its process may be
    busy with the job's code, and then the deadline of final reports decides.
    """
    calls = {worker: handle.abort.remote(generation) for worker, (handle, _) in workers.items()}
    nodes = {worker: ready.node for worker, (_, ready) in workers.items()}
    accept = roster.accept_now(set(nodes.values()))
    for worker, node in nodes.items():
        if node not in accept:
            lost(worker, Cause(kind="death", detail=f"{worker}: its node {node} refuses connections"))
            del calls[worker]
    silent = _unheard(calls, lost, verdict_s)
    if not silent:
        return
    suspects = {worker: (nodes[worker], workers[worker][1].pid) for worker in silent}
    seen = sightings(suspects, peer_stores, roster.living())
    for worker in silent:
        if worker not in seen or not seen[worker].alive:
            detail = f"{worker} did not answer within {verdict_s:.0f} s of an abort"
            lost(worker, Cause(kind="silence", detail=detail))


def _unheard(calls: Mapping[str, Any], lost: Lost, verdict_s: float) -> list[str]:
    """Those that gave no answer in time."""
    if not calls:
        return []
    done, _ = ray.wait(list(calls.values()), num_returns=len(calls), timeout=verdict_s)
    ended = set(done)
    for worker, call in calls.items():
        if call in ended:
            try:
                answer(call, verdict_s)
            except RayError as error:
                lost(worker, Cause(kind="death", detail=f"{worker}: {type(error).__name__}"))
    return [worker for worker, call in calls.items() if call not in ended]
