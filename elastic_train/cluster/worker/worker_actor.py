"""The worker's actor class: method names and concurrency groups, without importing torch.

Naming `Worker` itself would load torch in the controller, for seconds and in the way of every start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray

CONTROL, READ, LIFE = "control", "read", "life"
THREADS = {CONTROL: 8, READ: 4, LIFE: 1}
METHODS = {
    CONTROL: (
        "ready",
        "ping",
        "stack",
        "offer",
        "replay",
        "complete",
        "prepare",
        "dismiss",
        "join",
        "gather",
        "kept",
        "restore",
        "initialise",
        "go",
        "request",
        "forget",
        "repeat",
        "abort",
    ),
    READ: ("read", "bring", "digest_of", "sent"),
    LIFE: ("life",),
}


class WorkerActor:
    """Builds the Worker in the process that it is started in, and passes every call on to it."""

    def __init__(self, **arguments: Any) -> None:
        from elastic_train.cluster.worker.worker import Worker  # noqa: PLC0415

        self._worker = Worker(**arguments)


def _passed_on(name: str) -> Callable[..., Any]:
    def call(actor: WorkerActor, *arguments: Any, **named: Any) -> Any:
        return getattr(actor._worker, name)(*arguments, **named)

    return call


for _threads, _names in METHODS.items():
    for _name in _names:
        setattr(WorkerActor, _name, ray.method(concurrency_group=_threads)(_passed_on(_name)))
