"""Probe which of many addresses accept TCP connections, side by side under one deadline, without threads.

A dead process refuses at once, a cut-off host doesn't answer. The kernel repeats a lost packet only after a
second, so whoever is silent for half of the time is tried once more.
"""

from __future__ import annotations

import errno
import selectors
import socket
import time
from collections.abc import Iterable, Mapping
from typing import Literal, TypeVar

K = TypeVar("K")
WITHIN_S = 1.0
AT_ONCE = 256
"""Connections that are open at a time: a process has a limit of descriptors."""

_UNDER_WAY = (0, errno.EINPROGRESS, errno.EALREADY, errno.EWOULDBLOCK, errno.ECONNREFUSED)


Verdict = Literal["accepts", "refuses", "silent"]
"""What came of trying to connect. A refusal is said by the machine itself; silence may be ours."""


def reachable(places: Mapping[K, tuple[str, int]], within_s: float = WITHIN_S) -> dict[K, Verdict]:
    """What each of the places, (address, port) by name, answers."""
    names, found = list(places), dict[K, Verdict]()
    for first in range(0, len(names), AT_ONCE):
        some = {name: places[name] for name in names[first : first + AT_ONCE]}
        found |= _tried(some, some, within_s / 2)
        found |= _tried(some, [name for name in some if found[name] == "silent"], within_s / 2)
    return found


def _tried(places: Mapping[K, tuple[str, int]], names: Iterable[K], within_s: float) -> dict[K, Verdict]:
    found, waiting = dict[K, Verdict](), dict[socket.socket, K]()
    deadline = time.monotonic() + within_s
    with selectors.DefaultSelector() as looked_at:
        try:
            for name in names:
                found[name] = "silent"
                made = _connecting(places[name])
                if made is not None:
                    waiting[made] = name
                    looked_at.register(made, selectors.EVENT_WRITE)
            while waiting and (left := deadline - time.monotonic()) > 0:
                for key, _ in looked_at.select(left):
                    assert isinstance(key.fileobj, socket.socket)
                    looked_at.unregister(key.fileobj)
                    problem = key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                    found[waiting.pop(key.fileobj)] = _meant(problem)
                    key.fileobj.close()
            return found
        finally:
            for made in waiting:
                made.close()


def _meant(problem: int) -> Verdict:
    if problem in (errno.ECONNREFUSED, errno.ECONNRESET):
        return "refuses"
    return "silent" if problem else "accepts"


def _connecting(place: tuple[str, int]) -> socket.socket | None:
    """A connection under way, which may have failed by now; None where there is no way to the address."""
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
