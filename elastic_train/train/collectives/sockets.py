"""Find TCP sockets of this process by their end points and shut them down. Linux only.

gloo has no abort: neither destroying a group nor a shorter timeout wakes an operation that waits for a peer.
Shutting down the connected sockets below it does, within milliseconds and from any thread. A listening socket
must never be shut down: gloo ends the process when its accept fails.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

Endpoint = tuple[str, int]
"""Numeric address and port."""


def listening() -> dict[Endpoint, int]:
    """End points on which this process accepts connections, and the inode of each socket."""
    found: dict[Endpoint, int] = {}
    for fd in _descriptors():
        with _tcp(fd) as sock:
            if sock is not None and _is_listening(sock):
                try:
                    found[_endpoint(sock.getsockname())] = os.fstat(sock.fileno()).st_ino
                except OSError:
                    continue
    return found


def shut_connections(*, local: Endpoint | None = None, remote: frozenset[Endpoint]) -> int:
    """Shut down every connection accepted at `local` or made to one of `remote`; how many there were."""
    shut = 0
    for fd in _descriptors():
        with _tcp(fd) as sock:
            if sock is None or _is_listening(sock):
                continue
            try:
                if _endpoint(sock.getsockname()) == local or _endpoint(sock.getpeername()) in remote:
                    sock.shutdown(socket.SHUT_RDWR)
                    shut += 1
            except OSError:  # not connected (any more)
                continue
    return shut


def endpoints(host: str, port: int) -> frozenset[Endpoint]:
    """The numeric end points of a named one."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return frozenset(_endpoint((str(at[0]), int(at[1]))) for *_, at in found)


def _descriptors() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/fd")]  # noqa: PTH208 - runs while a peer is hung


@contextmanager
def _tcp(fd: int) -> Iterator[socket.socket | None]:
    """A duplicate of a descriptor if it is a TCP socket, closed afterwards.

    Looking and shutting down go through one duplicate, so a descriptor that is closed and used again in
    between cannot be mistaken for the one that was looked at.
    """
    try:
        copy = os.dup(fd)
    except OSError:
        yield None
        return
    try:
        sock = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        yield None
        return
    with sock:
        is_tcp = sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM
        yield sock if is_tcp else None


def _is_listening(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _endpoint(name: tuple[str, int] | tuple[str, int, int, int]) -> Endpoint:
    return name[0].removeprefix("::ffff:"), name[1]  # IPv4 through an IPv6 socket is IPv4
