"""Proxy in front of a real object store that answers some requests with errors (throttling), or never."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

Trouble = Literal["busy", "expired", "forbidden", "cut", "closed", "silent", "kept", "kept for now"]
"""503 with a word; 400 with ExpiredToken, as S3 says it; 403; a body that breaks off; a connection that
closes without answer, or stays open without one; 200 for a deletion that says of an object that it is kept,
for want of the right to delete it or for a fault of the server's."""
ANSWERS = {
    "busy": ("503 Service Unavailable", "SlowDown", "Please reduce your request rate."),
    "forbidden": ("403 Forbidden", "AuthorizationFailure", "This request is not authorized."),
    "expired": ("400 Bad Request", "ExpiredToken", "The provided token has expired."),
}
KEPT = {"kept": "AccessDenied", "kept for now": "InternalError"}
CUT = 64
"""Bytes of a body that come before it breaks off."""


@dataclass(slots=True)
class Lasting:
    """Trouble of so many seconds, from the first request that it meets."""

    trouble: Trouble
    seconds: float
    until: float | None = None

    def meets(self, now: float) -> bool:
        if self.until is None:
            self.until = now + self.seconds
        return now < self.until


@dataclass(slots=True)
class Front:
    """`give` makes the next requests fail, `trouble_for` all that come for a while; the others are the
    server's.
    """

    server: str
    endpoint: str = ""
    given: int = 0  # answers with trouble so far
    _trouble: Trouble = "busy"
    _left: int = 0
    _lasting: dict[bytes, Lasting] = field(default_factory=dict[bytes, Lasting])  # by what it is about
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def give(self, trouble: Trouble, times: int) -> None:
        with self._lock:
            self._trouble, self._left = trouble, times

    def trouble_for(self, trouble: Trouble, seconds: float, *, about: str = "") -> None:
        """From the first request on whose line has `about` in it, so many seconds of them fail.

        Troubles about several things last side by side.
        """
        with self._lock:
            self._lasting[about.encode()] = Lasting(trouble=trouble, seconds=seconds)

    def serve(self, listening: socket.socket) -> None:
        while True:
            try:
                client, _ = listening.accept()
            except OSError:  # closed: the block ended
                return
            threading.Thread(target=self._connection, args=(client,), daemon=True).start()

    def _connection(self, client: socket.socket) -> None:
        """One request per connection: what is answered never depends on the one before."""
        with client, suppress(OSError):
            request = _message(client)
            if not request:
                return
            trouble = self._next(request)
            if trouble in ANSWERS:
                client.sendall(_refusal(trouble, head=request.startswith(b"HEAD ")))
            elif trouble in KEPT:
                client.sendall(_kept(KEPT[trouble]))
            elif trouble == "silent":
                client.recv(1)  # until the client hangs up
            elif trouble != "closed":
                self._forward(request, client, cut=trouble == "cut")

    def _next(self, request: bytes) -> Trouble | None:
        line, now = request.partition(b"\r\n")[0], time.monotonic()
        with self._lock:
            if self._left:
                self._left -= 1
                trouble = self._trouble
            else:
                met = (one for about, one in self._lasting.items() if about in line and one.meets(now))
                found = next(met, None)
                if found is None:
                    return None
                trouble = found.trouble
            self.given += 1
            return trouble

    def _forward(self, request: bytes, client: socket.socket, *, cut: bool) -> None:
        there = urlsplit(self.server)
        head, split, body = request.partition(b"\r\n\r\n")
        head += b"\r\nConnection: close"
        with socket.create_connection((there.hostname, there.port)) as server:
            server.sendall(head + split + body)
            answer = b"".join(iter(lambda: server.recv(1 << 16), b""))
        if cut:
            answer = answer[: answer.index(b"\r\n\r\n") + 4 + CUT]
        client.sendall(answer)


@contextmanager
def troubled_front(server: str) -> Iterator[Front]:
    """Serve at an endpoint of its own until the block ends."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        front = Front(server=server, endpoint=f"http://127.0.0.1:{listening.getsockname()[1]}")
        thread = threading.Thread(target=front.serve, args=(listening,), daemon=True)
        thread.start()
        yield front
        listening.shutdown(socket.SHUT_RDWR)
    thread.join()


def _message(connection: socket.socket) -> bytes:
    """A whole request: its head, and as many bytes as that says or all of its chunks."""
    data = b""
    while b"\r\n\r\n" not in data:
        block = connection.recv(1 << 16)
        if not block:
            return b""
        data += block
    head, _, body = data.partition(b"\r\n\r\n")
    named = dict(line.lower().split(b":", 1) for line in head.split(b"\r\n")[1:])
    if b"100-continue" in named.get(b"expect", b""):
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
    length = int(named.get(b"content-length", b"0"))
    chunked = b"chunked" in named.get(b"transfer-encoding", b"")
    while len(body) < length or (chunked and not body.endswith(b"0\r\n\r\n")):
        block = connection.recv(1 << 16)
        if not block:
            return b""
        data, body = data + block, body + block
    return data


def _refusal(trouble: str, *, head: bool) -> bytes:
    status, code, message = ANSWERS[trouble]
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>"
    return _answer(status, body, head=head)


def _kept(code: str) -> bytes:
    error = f"<Error><Key>a/b</Key><Code>{code}</Code><Message>It stays.</Message></Error>"
    return _answer("200 OK", f"<?xml version='1.0'?><DeleteResult>{error}</DeleteResult>", head=False)


def _answer(status: str, body: str, *, head: bool) -> bytes:
    said = f"HTTP/1.1 {status}\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n"
    return (f"{said}Connection: close\r\n\r\n" + ("" if head else body)).encode()
