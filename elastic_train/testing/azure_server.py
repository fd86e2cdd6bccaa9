"""A server of Azure Blob Storage on this machine: Azurite, from npm's `azurite`."""

from __future__ import annotations

import importlib.util
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec

from elastic_train.testing.ray_processes import HOST, free_port
from elastic_train.testing.served_process import READY_S, served

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
    port = free_port()
    command = [
        program,
        "--blobHost", HOST, "--blobPort", str(port), "--location", str(directory),
        "--silent", "--skipApiVersionCheck", "--disableTelemetry",
    ]  # fmt: skip
    with served(command, directory, lambda: socket.create_connection((HOST, port), timeout=READY_S).close()):
        yield AzureServer(endpoint=f"http://{HOST}:{port}")
