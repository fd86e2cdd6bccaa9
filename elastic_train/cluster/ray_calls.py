"""Ray's calls with types that say what they are: any object, checked where it is used."""

from __future__ import annotations

import threading
from typing import Any

import ray


def remote(definition: Any, **settings: Any) -> Any:
    """An actor class or a task, with the settings that only the decorator takes."""
    return ray.remote(**settings)(definition) if settings else ray.remote(definition)


def answer(call: Any, timeout: float) -> Any:
    """What a call returns; GetTimeoutError after `timeout` seconds, RayError where the actor is gone."""
    return ray.get(call, timeout=timeout)


def leave(*, after_s: float) -> None:
    """End this actor after a moment, on purpose: Ray tells drivers of a process that just exits as lost."""
    own = ray.get_runtime_context().current_actor
    threading.Timer(after_s, ray.kill, (own,), {"no_restart": True}).start()


def named_actors() -> list[Any]:
    """Every living named actor of the cluster, as {"name", "namespace"}."""
    return list(ray.util.list_named_actors(all_namespaces=True))
