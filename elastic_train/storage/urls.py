"""Parse URLs and plain paths of stores: file system, host, place.

Nothing is decoded: no query, no escapes. What looks like a URL and is none is refused, because the directory
`s3:` that would be made otherwise is found by nobody.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import fsspec
from fsspec.registry import known_implementations

from elastic_train.errors import ConfigError

LOCAL = ("file", "local")
WEB = ("http", "https")
HOSTS: Mapping[str, str] = {
    "ftp": "username",
    "hdfs": "user",
    "sftp": "username",
    "smb": "username",
    "ssh": "username",
    "webhdfs": "user",
}
"""File systems whose URL begins with a host, and what each calls the user there."""
DEFAULT_HOST = ("hdfs",)
"""Those whose own configuration says which host is meant where the URL has none."""
AZURE = ("abfs", "abfss", "az")
SAME = {"abfss": "abfs"}
"""Names that a driver knows and fsspec's registry doesn't."""
AZURE_CLOUD = ".core.windows.net"
WRAPPERS = frozenset(
    {"blockcache", "cached", "data", "dir", "filecache", "generic", "libarchive", "reference"}
)
WRAPPERS |= {"simplecache", "tar", "zip"}
"""Not places themselves: views of what is inside another file or at another URL."""
PACKAGES: Mapping[str, str] = {"hdfs": "pyarrow", "sftp": "paramiko", "smb": "smbprotocol", "ssh": "paramiko"}
"""What fsspec's own file systems need; others are in a package of their name."""
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(/*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """`protocol` is "" for a path of this machine. `options` is what the URL says of the host."""

    protocol: str
    root: str
    options: Mapping[str, object] = field(default_factory=dict[str, object])


def parse(url: str) -> Address:
    """Where a URL or path leads, or ConfigError that says what is wrong with it."""
    if not url:
        raise _wrong(url, "names nothing.")
    try:
        impossible = b"\0" in os.fsencode(url)
    except UnicodeEncodeError:
        impossible = True
    if impossible:
        raise _wrong(url, "has a character that no path has.")
    known = {*fsspec.available_protocols(), *LOCAL, *SAME}
    found = _URL.match(url)
    if found is None:
        first, split, _ = url.partition("//")
        if split and first.lower() in known:
            raise _wrong(url, f"is no URL: {first.lower()}:// is.")
        return Address(protocol="", root=_home(url))
    protocol, slashes = found[1].lower(), found[2]
    if protocol not in known:
        if not slashes:
            return Address(protocol="", root=url)
        near = difflib.get_close_matches(protocol, sorted(known), n=1)
        hint = f"Is {near[0]}:// meant?" if near else ""
        raise _wrong(url, f"begins with {found[1]!r}, which fsspec doesn't know.", hint)
    rest = url[found.end(1) + 3 :]
    if len(slashes) < 2:
        hint = f"For a directory of that name begin with ./ as in ./{url}"
        raise _wrong(url, f"is no URL: {protocol}:// is.", hint)
    if protocol in LOCAL:
        return Address(protocol="", root=_of_file(url, rest))
    if protocol in WEB:
        hint = "Copy it to a path or an object store first."
        raise _wrong(url, "is an address of the web, which can't be listed or written.", hint)
    if protocol in WRAPPERS:
        raise _wrong(url, "is no place that objects can be kept at.")
    place, _, path = rest.partition("/")
    protocol = SAME.get(protocol, protocol)
    if protocol in HOSTS:
        return Address(protocol=protocol, root="/" + path.strip("/"), options=_host(url, protocol, place))
    if protocol in AZURE and "@" in place:
        container, _, host = place.partition("@")
        account = {"account_name": host.partition(".")[0]}
        if not host.endswith(AZURE_CLOUD):
            account["account_host"] = host
        return Address(protocol=protocol, root=f"{container}/{path}".strip("/"), options=account)
    if not place and protocol != "memory":
        raise _wrong(url, "names no bucket.")
    return Address(protocol=protocol, root=rest.strip("/"))


def is_local(url: str) -> bool:
    """Whether a URL is a path of this machine's file system."""
    return not parse(url).protocol


def child_url(url: str, name: str) -> str:
    """The URL of a directory inside another."""
    return f"{url.rstrip('/')}/{name}"


def package_of(protocol: str) -> str:
    """What to install so that fsspec can open URLs of a protocol."""
    if protocol in PACKAGES:
        return PACKAGES[protocol]
    return str(known_implementations.get(protocol, {}).get("class", protocol)).partition(".")[0]


def _home(path: str) -> str:
    """The path with `~` as a shell has it: nobody wants a directory of that name."""
    try:
        return str(Path(path).expanduser()) if path.startswith("~") else path
    except RuntimeError as error:
        raise _wrong(path, "begins with the home directory of nobody that is known here.") from error


def _of_file(url: str, rest: str) -> str:
    path = rest.removeprefix("localhost") if rest.startswith("localhost/") else rest
    if path.startswith("~"):
        return _home(path)
    if not path.startswith("/"):
        host = path.partition("/")[0]
        hint = f"A path of this machine has three slashes: file:///{path}"
        raise _wrong(url, f"names the host {host!r}, whose files can't be reached.", hint)
    return "/" + path.lstrip("/")


def _host(url: str, protocol: str, place: str) -> dict[str, object]:
    user, _, host = place.rpartition("@")
    if ":" in user:
        hint = "It would be written into logs and manifests: put it into fsspec's configuration."
        raise _wrong(url.replace(user, user.partition(":")[0]), "held a password.", hint)
    bare, colon, port = host.rpartition(":")
    if colon and not port.isdecimal():
        raise _wrong(url, f"names the port {port!r}, which is no number.")
    host = bare if colon else host
    if not host:
        if protocol not in DEFAULT_HOST or user:
            raise _wrong(url, "names no host.")
        return {}
    said: dict[str, object] = {"host": host}
    if colon:
        said["port"] = int(port)
    if user:
        said[HOSTS[protocol]] = user
    return said


def _wrong(url: str, problem: str, remedy: str = "") -> ConfigError:
    return ConfigError(field="storage_path", problem=f"{url!r} {problem}", remedy=remedy)
