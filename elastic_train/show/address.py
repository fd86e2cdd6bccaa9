"""Where a page is served, and who needs a token to look at it. Needs no server to be installed."""

from __future__ import annotations

import secrets
import socket
from dataclasses import dataclass

from elastic_train.errors import ConfigError

LOOPBACK = ("127.0.0.1", "localhost", "::1")
PORTS = range(65536)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageAddress:
    """`token` is None where nobody needs one. Port 0 is any free one."""

    host: str
    port: int
    token: str | None = None

    @property
    def base(self) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}/"

    @property
    def url(self) -> str:
        """What a person opens."""
        return self.base + (f"?token={self.token}" if self.token else "")


def listen(host: str, port: int, field: str) -> socket.socket:
    """A socket that listens there. Raises ConfigError where that can't be."""
    try:
        family, *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigError(
            field=field,
            problem=f"{host}:{port} can't be listened to: {error.strerror}.",
            remedy="Name another port, or 0 for any that is free.",
        ) from error


def guarded(host: str, port: int, token: str | None) -> PageAddress:
    """With a token wherever other machines can ask: the one given, else a new one."""
    if host not in LOOPBACK and not token:
        token = secrets.token_urlsafe(24)
    return PageAddress(host=host, port=port, token=token or None)


def said_address(said: str | int, field: str) -> tuple[str, int]:
    """Host and port of a PORT, which is one of this machine alone, or of HOST:PORT. Raises ConfigError."""
    host, colon, port = str(said).rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if colon else "127.0.0.1"
    if isinstance(said, bool) or not host or not port.isdecimal() or int(port) not in PORTS:
        raise ConfigError(
            field=field,
            problem=f"must be a port or HOST:PORT, got {said!r}.",
            remedy="8420 serves this machine alone, 0.0.0.0:8420 also others, who need a token.",
        )
    return host, int(port)


def not_installed(error: ImportError, field: str) -> ConfigError:
    """The error for a page without the extra that serves it."""
    return ConfigError(
        field=field,
        problem=f"{error.name} is not installed.",
        remedy="Install the extra: pip install 'elastic_train[ui]'.",
    )
