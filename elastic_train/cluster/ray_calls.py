"""Typed wrappers of Ray calls: an answer is `object` and is checked where it is used."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import ray

from elastic_train.errors import ConfigError

LOOK_S = 0.2
"""How often whoever waits for long looks whether there is still a reason to."""

FETCH_S = 60.0
"""How long an answer may take that is here already."""

KNOCK_S = 2.0
"""How long an address may take to answer before Ray is asked to try it."""


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


def connect(address: str, **settings: Any) -> None:
    """Connect this process to the cluster at an address; ConfigError where there is none."""
    try:
        _knock(address)  # Ray would wait for minutes for what is refused at once
        ray.init(address=address, log_to_driver=False, **settings)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            field="address",
            problem=f"there is no Ray cluster to join at {address}: {error}".splitlines()[0].rstrip(".")
            + ".",
            remedy="Start it, correct address or RAY_ADDRESS, or say 'local' for one on this machine.",
        ) from error


def host_and_port(address: str) -> tuple[str, int]:
    """Of HOST:PORT, where IPv6 is in brackets; port 0 where it has none."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port) if port.isdecimal() else 0


def disconnect() -> None:
    """Leave the cluster, if this process joined one."""
    ray.shutdown()


def _knock(address: str) -> None:
    """ConnectionRefusedError where nothing listens; whatever else may be wrong is Ray's to say."""
    host, port = host_and_port(address)
    try:
        if host and port:
            socket.create_connection((host, port), timeout=KNOCK_S).close()
    except ConnectionRefusedError:
        raise
    except OSError:
        return


def named_actors() -> list[Any]:
    """Every living named actor of the cluster, as {"name", "namespace"}."""
    return list(ray.util.list_named_actors(all_namespaces=True))
