"""A server of Azure Blob Storage on this machine: Azurite, from npm's `azurite`."""

from __future__ import annotations

import importlib.util
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec

READY_S = 60.0
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Azurite's own, which its documentation names: no secret."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AzureServer:
    """A running server. `options` are what `open_store` wants for it."""

    endpoint: str

    @property
    def options(self) -> Mapping[str, Any]:
        return {
            "connection_string": f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};"
            f"BlobEndpoint={self.endpoint}/{ACCOUNT};"
        }

    def container(self, name: str) -> str:
        """Make a container, if there is none, and return its URL."""
        filesystem = fsspec.filesystem("abfs", **self.options, skip_instance_cache=True)
        if not filesystem.exists(name):
            filesystem.mkdir(name)
        return f"abfs://{name}"


def missing(program: str) -> str:
    """Why no server can run here; empty if one can."""
    if importlib.util.find_spec("adlfs") is None:
        return "adlfs is not installed"
    return "" if shutil.which(program) else f"there is no {program} (npm install azurite)"


@contextmanager
def azure_server(directory: Path, program: str = "azurite-blob") -> Iterator[AzureServer]:
    """Serve from `directory` until the block ends, by a program of that name or path."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    directory.mkdir(parents=True, exist_ok=True)
    command = [
        program,
        "--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(directory),
        "--silent", "--skipApiVersionCheck", "--disableTelemetry",
    ]  # fmt: skip
    with (directory / "server.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=directory)
    try:
        _until_it_listens(port, process)
        yield AzureServer(endpoint=f"http://127.0.0.1:{port}")
    finally:
        process.kill()
        process.wait()


def _until_it_listens(port: int, process: subprocess.Popen[bytes]) -> None:
    started, pause = time.monotonic(), threading.Event()
    while True:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=READY_S):
                return
        except OSError as error:
            if process.poll() is not None or time.monotonic() - started > READY_S:
                raise RuntimeError(f"Azurite did not come up: {error}") from error
        pause.wait(0.1)
