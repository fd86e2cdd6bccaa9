"""A server of Google Cloud Storage's JSON interface on this machine: `gcp-storage-emulator`.

It knows no preconditions, so `ifGenerationMatch=0`, a create that loses against what is there, is added here
as the service documents it: status 412, and nothing is written. So is giving up an upload in parts: 499.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from elastic_train.testing.ray_processes import HOST, free_port
from elastic_train.testing.served_process import READY_S, served

CANCELLED = SimpleNamespace(value=499, phrase="Client Closed Request")


@dataclass(frozen=True, slots=True, kw_only=True)
class GCSServer:
    """A running server. `options` are what `open_store` wants for it."""

    endpoint: str

    @property
    def options(self) -> Mapping[str, Any]:
        return {"endpoint_url": self.endpoint, "token": "anon", "project": "test"}

    def bucket(self, name: str) -> str:
        """Make a bucket, if there is none, and return its URL."""
        body = b'{"name": "' + name.encode() + b'"}'
        made = urllib.request.Request(
            f"{self.endpoint}/storage/v1/b?project=test",
            data=body,
            headers={"Content-Type": "application/json"},
        )
        try:
            urllib.request.urlopen(made, timeout=READY_S).close()
        except urllib.error.HTTPError as error:
            if error.code != HTTPStatus.CONFLICT:
                raise
        return f"gs://{name}"


def missing() -> str:
    """Why no server can run here; empty if one can."""
    absent = [name for name in ("gcsfs", "gcp_storage_emulator") if importlib.util.find_spec(name) is None]
    return f"not installed: {', '.join(absent)}" if absent else ""


@contextmanager
def gcs_server(directory: Path) -> Iterator[GCSServer]:
    """Serve from memory until the block ends; the server's log is in `directory`."""
    port = free_port()
    server = GCSServer(endpoint=f"http://{HOST}:{port}")
    command = (sys.executable, "-m", __name__, str(port))
    with served(command, directory, lambda: urllib.request.urlopen(server.endpoint, timeout=READY_S).close()):
        yield server


def _serve(port: int) -> None:
    objects: Any = importlib.import_module("gcp_storage_emulator.handlers.objects")
    one_by_one, insert = threading.Lock(), objects.insert

    def conditional(request: Any, response: Any, storage: Any, *args: Any, **kwargs: Any) -> None:
        if request.query.get("ifGenerationMatch", [""])[0] != "0":
            insert(request, response, storage, *args, **kwargs)
            return
        with one_by_one:
            if _there(storage, request.params["bucket_name"], _named(request)):
                response.status = HTTPStatus.PRECONDITION_FAILED
                response.json({"error": {"code": 412, "message": "conditionNotMet"}})
                return
            insert(request, response, storage, *args, **kwargs)

    objects.insert = conditional
    server = importlib.import_module("gcp_storage_emulator.server")  # takes what it finds there
    for _, methods in server.HANDLERS:
        if methods.get("PUT") is objects.upload_partial:
            methods["DELETE"] = _given_up
    server.create_server(HOST, port, in_memory=True).run()


def _given_up(request: Any, response: Any, storage: Any) -> None:
    """The service's answer to the end of an upload in parts."""
    response.status = CANCELLED


def _there(storage: Any, bucket: str, name: str) -> bool:
    absent = importlib.import_module("gcp_storage_emulator.exceptions").NotFound
    try:
        storage.get_file_obj(bucket, name)
    except absent:
        return False
    return True


def _named(request: Any) -> str:
    """The object's name: of the query, or of the first part of the body."""
    if name := request.query.get("name", [""])[0]:
        return name
    return request.data["meta"]["name"]


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
