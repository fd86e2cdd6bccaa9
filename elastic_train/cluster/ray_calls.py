"""Ray's calls with types that say what they are: any object, checked where it is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray

LOOK_S = 0.2
"""How often whoever waits for long looks whether there is still a reason to."""

FETCH_S = 60.0
"""How long an answer may take that is here already."""


def remote(definition: Any, **settings: Any) -> Any:
    """An actor class or a task, with the settings that only the decorator takes."""
    return ray.remote(**settings)(definition) if settings else ray.remote(definition)


def answer(call: Any, timeout: float) -> Any:
    """What a call returns; GetTimeoutError after `timeout` seconds, RayError where the actor is gone."""
    return ray.get(call, timeout=timeout)


def answer_while(call: Any, check: Callable[[], None], look_s: float = LOOK_S) -> Any:
    """What a call returns, however long it takes; what `check` raises ends the wait."""
    while not ray.wait([call], timeout=look_s)[0]:
        check()
    return ray.get(call, timeout=FETCH_S)


def named_actors() -> list[Any]:
    """Every living named actor of the cluster, as {"name", "namespace"}."""
    return list(ray.util.list_named_actors(all_namespaces=True))
