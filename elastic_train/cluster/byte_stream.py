"""Bytes from process to process, straight out of memory into memory.

Who wants them listens, and has the holder told by Ray where to bring them, with a ticket that nobody else
has. As objects of Ray they would be copied into and out of two object stores on their way.
"""

from __future__ import annotations

import hmac
import secrets
import selectors
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np
import ray

from elastic_train.cluster.ray_calls import FETCH_S, answer, answer_while
from elastic_train.errors import GroupBroken

TICKET_BYTES = 16
SEND_BYTES = 16 * 2**20
SILENCE_S = 60.0
"""How long a connection, or SEND_BYTES on it, may take before the holder gives up."""
LOOK_S = 0.2
"""How often whoever waits for bytes looks whether there is still a reason to."""

Memory = Iterator[memoryview]
"""Where bytes go, one after the other; what was yielded is full when the next is asked for."""


class BrokenOff(Exception):
    """A holder ended before all of its bytes had come; its call says why."""

    def __init__(self, ticket: bytes) -> None:
        super().__init__("the holder ended early")
        self.ticket = ticket


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """Where the bytes of one holder are waited for."""

    host: str
    port: int
    ticket: bytes = field(repr=False)


def bring(arrays: Iterable[np.ndarray], door: Door, *, generation: int) -> None:
    """Send C-contiguous arrays to a door, end to end. GroupBroken where that doesn't work."""
    try:
        with socket.create_connection((door.host, door.port), timeout=SILENCE_S) as connection:
            connection.sendall(door.ticket)
            for array in arrays:
                data = array.reshape(-1).view(np.uint8).data
                for start in range(0, len(data), SEND_BYTES):
                    connection.sendall(data[start : start + SEND_BYTES])
    except OSError as error:
        reason = f"a state could not be brought to {door.host}: {error}"
        raise GroupBroken(generation=generation, reason=reason) from error


@dataclass(slots=True, eq=False)
class _Arrival:
    """One connection: the memory that is being filled, how much of it is, and what comes after it."""

    target: memoryview
    ticket: bytes = b""  # until it is known, the target is for the ticket
    filled: int = 0
    following: Memory | None = None


class Arrivals:
    """Listens on an address while bytes are brought; for one thread."""

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family)
        self._socket.setblocking(False)
        self._host, self._port = host, int(self._socket.getsockname()[1])

    def __enter__(self) -> Arrivals:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def door(self) -> Door:
        """For one holder."""
        return Door(host=self._host, port=self._port, ticket=secrets.token_bytes(TICKET_BYTES))

    def take(self, wanted: Mapping[bytes, Memory], look: Callable[[], None]) -> None:
        """Fill the memory of each ticket with what its holder brings. `look` is called after each LOOK_S at
        most, and may raise. BrokenOff where a holder ended early.
        """
        left = dict(wanted)
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            try:
                while left:
                    for key, _ in selector.select(LOOK_S):
                        if key.data is None:
                            self._accept(selector)
                        elif self._advance(key.fileobj, key.data, left):  # pyright: ignore[reportArgumentType]
                            selector.unregister(key.fileobj)
                            key.fileobj.close()  # pyright: ignore[reportAttributeAccessIssue]
                    look()
            finally:
                for key in list(selector.get_map().values()):
                    if key.data is not None:
                        key.fileobj.close()  # pyright: ignore[reportAttributeAccessIssue]

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            connection, _ = self._socket.accept()
        except OSError:  # whoever knocked is gone
            return
        connection.setblocking(False)
        selector.register(
            connection, selectors.EVENT_READ, _Arrival(target=memoryview(bytearray(TICKET_BYTES)))
        )

    def _advance(self, connection: socket.socket, arrival: _Arrival, left: dict[bytes, Memory]) -> bool:
        """Take what has come; whether this connection is over."""
        try:
            came = connection.recv_into(arrival.target[arrival.filled :])
        except BlockingIOError:
            return False
        except OSError:
            came = 0
        if came == 0:
            if arrival.ticket:
                raise BrokenOff(arrival.ticket)
            return True
        arrival.filled += came
        if arrival.filled < len(arrival.target):
            return False
        if not arrival.ticket:
            shown = bytes(arrival.target)
            arrival.ticket = next((ticket for ticket in left if hmac.compare_digest(ticket, shown)), b"")
            if not arrival.ticket:  # a stranger
                return True
            arrival.following = left[arrival.ticket]
        assert arrival.following is not None
        following = next((memory for memory in arrival.following if len(memory)), None)
        if following is None:
            del left[arrival.ticket]
            return True
        arrival.target, arrival.filled = following, 0
        return False


def arrived(
    arrivals: Arrivals,
    calls: Mapping[bytes, Any],
    memory: Mapping[bytes, Memory],
    check: Callable[[], None],
    *,
    generation: int,
) -> None:
    """Take what holders bring whose calls these are, by ticket. Raises what a call raised, what `check` does,
    and GroupBroken where a holder ended early and knows no reason.
    """
    pending = list(calls.values())

    def look() -> None:
        nonlocal pending
        check()
        if pending:
            done, pending = ray.wait(pending, num_returns=len(pending), timeout=0)
            for call in done:
                answer(call, FETCH_S)

    try:
        arrivals.take(memory, look)
    except BrokenOff as error:
        answer_while(calls[error.ticket], check)
        raise GroupBroken(generation=generation, reason="a holder of its state ended early") from error
