"""One object that is uploaded in parts, some of them at the same time, each tried again by itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from elastic_train.errors import StorageError, StorageNotFound
from elastic_train.storage import object_store
from elastic_train.storage.store import Buffer

AT_ONCE = 4
"""Parts of one object on their way: one connection to S3 has a fraction of a network's bandwidth."""

Call = Callable[..., Any]
"""A method of S3 for this object, with its arguments; tried again, and failures named."""


class Upload:
    """A sink. The last call is `commit` or `discard`; an object smaller than a part goes in one request."""

    def __init__(self, call: Call, size: Callable[[], int]) -> None:
        self._call, self._size = call, size
        self._buffer, self._total = bytearray(), 0
        self._id = ""
        self._pool = ThreadPoolExecutor(AT_ONCE)
        self._sent: deque[Future[Any]] = deque()
        self._parts: list[dict[str, Any]] = []

    def write(self, data: Buffer) -> None:
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        self._total += len(view)
        while len(view):
            taken = min(len(view), object_store.BLOCK - len(self._buffer))
            self._buffer += view[:taken]
            view = view[taken:]
            if len(self._buffer) == object_store.BLOCK:
                self._send()

    def commit(self) -> None:
        if not self._id:
            self._call("put_object", Body=bytes(self._buffer))
        else:
            if self._buffer:
                self._send()
            while self._sent:
                self._receive()
            try:
                parts = {"Parts": self._parts}
                self._call("complete_multipart_upload", UploadId=self._id, MultipartUpload=parts)
            except StorageNotFound:
                # An earlier try whose answer was lost may have completed it.
                if self._size() != self._total:
                    raise
        self._pool.shutdown()

    def discard(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        if self._id:
            with suppress(StorageError):
                self._call("abort_multipart_upload", UploadId=self._id)

    def _send(self) -> None:
        if not self._id:
            self._id = self._call("create_multipart_upload")["UploadId"]
        if len(self._sent) == AT_ONCE:
            self._receive()
        number, body = len(self._parts) + len(self._sent) + 1, bytes(self._buffer)
        self._buffer.clear()
        self._sent.append(
            self._pool.submit(self._call, "upload_part", UploadId=self._id, PartNumber=number, Body=body)
        )

    def _receive(self) -> None:
        """Wait for the oldest part."""
        tag = self._sent.popleft().result()["ETag"]
        self._parts.append({"PartNumber": len(self._parts) + 1, "ETag": tag})
