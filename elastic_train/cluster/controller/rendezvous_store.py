"""The rendezvous store of a run's groups: an actor on the controller's node, started anew where it ended."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastic_train.cluster import ray_private
from elastic_train.cluster.ray_calls import answer, remote
from elastic_train.cluster.rendezvous_actor import Rendezvous

ANSWER_S = 5.0


class RendezvousStore:
    """Safe from several threads. `start_s` is how long a new store's process may take."""

    def __init__(self, environment: Mapping[str, str], *, start_s: float) -> None:
        self._environment, self._start_s = dict(environment), start_s
        self._actor: Any = None
        self._lock = threading.Lock()

    def address(self) -> tuple[str, int]:
        """Host and port; of a new store where the old one does not answer."""
        with self._lock:
            if self._actor is not None:
                with suppress(RayError, GetTimeoutError):
                    return answer(self._actor.address.remote(), ANSWER_S)
            self._actor = (
                remote(Rendezvous)
                .options(
                    num_cpus=0,
                    scheduling_strategy=NodeAffinitySchedulingStrategy(ray_private.this_node(), soft=False),
                    runtime_env={"env_vars": self._environment},
                )
                .remote()
            )
            return answer(self._actor.address.remote(), self._start_s)

    def end(self) -> None:
        if self._actor is not None:
            with suppress(RayError):
                ray.kill(self._actor)
