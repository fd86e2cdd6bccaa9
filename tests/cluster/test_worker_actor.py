"""What a controller can call is what a worker has."""

from __future__ import annotations

import inspect

import pytest

from elastic_train.cluster.worker.worker import Worker
from elastic_train.cluster.worker.worker_actor import METHODS, WorkerActor

pytestmark = pytest.mark.ring1


def public(kind: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")}


def test_the_actor_has_each_method_of_a_worker_once() -> None:
    named = [name for names in METHODS.values() for name in names]
    assert sorted(named) == sorted(public(Worker))
    assert public(WorkerActor) == public(Worker)
