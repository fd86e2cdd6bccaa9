"""Which of many addresses accept connections, tried side by side under one deadline and without threads.

A dead process refuses at once, a cut-off host doesn't answer. The kernel repeats a lost packet only after a
second, so whoever is silent for half of the time is tried once more.
"""

from __future__ import annotations

import errno
import selectors
import socket
import time
from collections.abc import Iterable, Mapping
from typing import TypeVar

K = TypeVar("K")
WITHIN_S = 1.0
AT_ONCE = 256
"""Connections that are open at a time: a process has a limit of descriptors."""

_UNDER_WAY = (0, errno.EINPROGRESS, errno.EALREADY, errno.EWOULDBLOCK)


def reachable(places: Mapping[K, tuple[str, int]], within_s: float = WITHIN_S) -> frozenset[K]:
    """Those of the places, (address, port) by name, where something accepts connections."""
    names, found = list(places), set[K]()
    for first in range(0, len(names), AT_ONCE):
        some = {name: places[name] for name in names[first : first + AT_ONCE]}
        accepted, silent = _tried(some, some, within_s / 2)
        found |= accepted
        found |= _tried(some, silent, within_s / 2)[0]
    return frozenset(found)


def _tried(places: Mapping[K, tuple[str, int]], names: Iterable[K], within_s: float) -> tuple[set[K], set[K]]:
    """Those that accepted, and those that gave no answer; the others refused."""
    accepted, waiting = set[K](), dict[socket.socket, K]()
    deadline = time.monotonic() + within_s
    with selectors.DefaultSelector() as looked_at:
        try:
            for name in names:
                made = _connecting(places[name])
                if made is not None:
                    waiting[made] = name
                    looked_at.register(made, selectors.EVENT_WRITE)
            while waiting and (left := deadline - time.monotonic()) > 0:
                for key, _ in looked_at.select(left):
                    assert isinstance(key.fileobj, socket.socket)
                    looked_at.unregister(key.fileobj)
                    name = waiting.pop(key.fileobj)
                    if key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                        accepted.add(name)
                    key.fileobj.close()
            return accepted, set(waiting.values())
        finally:
            for made in waiting:
                made.close()


def _connecting(place: tuple[str, int]) -> socket.socket | None:
    """A connection under way; None where it is refused or makes no sense."""
    address, port = place
    made = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    made.setblocking(False)
    try:
        if made.connect_ex((address, port)) in _UNDER_WAY:
            return made
    except OSError:  # no such name
        pass
    made.close()
    return None
