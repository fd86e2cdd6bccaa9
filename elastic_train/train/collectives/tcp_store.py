"""Rendezvous of a generation's members: a TCPStore served by a process of its own.

One client per process and store serves all generations (a connect costs a reverse name look-up, which takes
5 s when a packet is lost); a prefix per generation keeps them apart, so a generation is formed at most once.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta

from torch._C._distributed_c10d import Store, TCPStore

from elastic_train.train.collectives.sockets import Endpoint

POLL_S, SLOW_POLL_S = 0.001, 0.02
"""Between two looks at first, and at most. In between it is a quarter of what was waited: who is there soon
is seen soon, and a server of many members isn't asked too often.
"""

_clients: dict[tuple[str, int], TCPStore] = {}


def serve_store(host: str) -> tuple[TCPStore, int]:
    """A store server on a free port of this host, alive as long as the returned object; and its port."""
    server = TCPStore(host, 0, None, True, wait_for_workers=False)
    forget_client(host, server.port)  # of a server that had the port before
    return server, server.port


def store_client(host: str, port: int, check_alive: Callable[[], None], timeout_s: float) -> TCPStore:
    """This process's client of the store at (host, port), connected on first use.

    Connecting can't be interrupted and may hang, so it runs in a thread that is left behind if `check_alive`
    raises.
    """
    client = _clients.get((host, port))
    if client is not None:
        return client
    connecting: Future[TCPStore] = Future()

    def connect() -> None:
        try:
            connecting.set_result(TCPStore(host, port, None, False, timedelta(seconds=timeout_s), False))
        except RuntimeError as error:
            connecting.set_exception(error)

    threading.Thread(target=connect, name="connect to the store", daemon=True).start()
    while not wait([connecting], timeout=0.02).done:
        check_alive()
    client = _clients[host, port] = connecting.result()
    return client


def forget_client(host: str, port: int) -> None:
    """Drop a client whose connection failed; the next generation connects anew."""
    _clients.pop((host, port), None)


class InterruptibleStore(Store):
    """A store whose waits end when `check_alive` raises; gloo's own rendezvous runs through it.

    torch calls these methods from C++, so an exception raised here ends the construction of a process group.
    """

    def __init__(self, store: Store, check_alive: Callable[[], None], timeout_s: float) -> None:
        super().__init__()
        self._store = store
        self._check_alive = check_alive
        self._timeout = timedelta(seconds=timeout_s)
        self._own: list[str] = []

    def withdraw(self) -> None:
        """Delete what was set through this store, so that nothing of a meeting is left."""
        own, self._own = self._own, []
        for key in own:
            self._store.delete_key(key)

    @property
    def timeout(self) -> timedelta:  # type: ignore[override]
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Waits are bounded by the forming of the group alone."""

    def set(self, key: str, value: bytes | str) -> None:  # type: ignore[override]
        self._check_alive()
        self._own.append(key)
        self._store.set(key, value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(key)

    def add(self, key: str, value: int) -> int:
        self._check_alive()
        self._own.append(key)
        return self._store.add(key, value)

    def check(self, keys: Sequence[str]) -> bool:  # type: ignore[override]
        return self._store.check(list(keys))

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:  # type: ignore[override]
        """Until all keys are there. The client is shared, so no call blocks inside it."""
        began, limit_s = time.monotonic(), (timeout or self._timeout).total_seconds()
        while not self._store.check(list(keys)):
            self._check_alive()
            waited = time.monotonic() - began
            if waited > limit_s:
                raise TimeoutError(f"no {', '.join(keys)} in the store")
            time.sleep(min(POLL_S + waited / 4, SLOW_POLL_S))


def check_in(
    store: Store,
    *,
    rank: int,
    world_size: int,
    listener: Endpoint,
    reached: Callable[[str], None] = lambda point: None,
) -> frozenset[Endpoint]:
    """Announce a member and wait for all others; where the others accept connections."""
    store.set(f"member/{rank}", json.dumps(listener))
    reached("announced")
    others = [f"member/{other}" for other in range(world_size) if other != rank]
    store.wait(others)
    announced = (json.loads(store.get(key)) for key in others)
    return frozenset((address, port) for address, port in announced)
