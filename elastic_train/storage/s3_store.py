"""A prefix of an S3 bucket as a store: what S3 can do in fewer or safer requests than any object store."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any

from elastic_train.errors import ConfigError, StorageError, StorageNotFound
from elastic_train.storage.object_store import ObjectStore, published
from elastic_train.storage.s3_upload import Upload
from elastic_train.storage.store import Names, Sink, check_path, check_prefix

GONE = frozenset({"NoSuchKey", "NoSuchVersion"})
"""What some servers say of an object that was not there."""
DENIED = "AccessDenied"


class S3Store(ObjectStore):
    """A prefix of a bucket. The create is `If-None-Match: *`."""

    def size(self, path: str) -> int:
        # s3fs would list after every HEAD that finds nothing, in search of a directory.
        bucket, key = self._split(self._key(path))
        found = self._run(lambda: self._fs.call_s3("head_object", Bucket=bucket, Key=key), "look at", path)
        return int(found["ContentLength"])

    @contextmanager
    def stream(self, path: str) -> Iterator[Sink]:
        bucket, key = self._split(self._key(path))

        def call(method: str, **arguments: Any) -> Any:
            request = {"Bucket": bucket, "Key": key, **arguments}
            return self._run(lambda: self._fs.call_s3(method, **request), "write", path)

        with published(Upload(call, lambda: self.size(path))) as sink:
            yield sink

    def delete(self, paths: Iterable[str]) -> None:
        rest = iter(paths)
        while batch := tuple(islice(rest, 1000)):
            keys = [{"Key": self._split(self._key(p))[1]} for p in batch]
            request = {"Bucket": self._bucket, "Delete": {"Objects": keys, "Quiet": True}}
            self._run(lambda r=request: self._delete(r), "delete", batch[0])

    def _delete(self, request: dict[str, Any]) -> None:
        """The answer has status 200 also where objects were kept, and says of each of them why. StorageError
        for what the store refuses to this person; the rest is tried again."""
        answered = self._fs.call_s3("delete_objects", **request)
        kept = [one for one in answered.get("Errors", ()) if one.get("Code") not in GONE]
        for one in sorted(kept, key=lambda one: one.get("Code") != DENIED):
            problem = f"{one.get('Code')}: {one.get('Message')}"
            if one.get("Code") == DENIED:
                key = f"s3://{self._bucket}/{one.get('Key')}"
                remedy = "What a run no longer needs is deleted: allow it s3:DeleteObject."
                raise StorageError(path=key, operation="delete", problem=f"{problem}. {remedy}")
            raise OSError(errno.EBUSY, problem, one.get("Key"))

    def unfinished(self, prefix: str = "") -> Names:
        cut = len(self._split(self._root + "/")[1])
        return sorted(u["Key"][cut:] for u in self._uploads(check_prefix(prefix)))

    def delete_tree(self, prefix: str) -> None:
        super().delete_tree(prefix)
        for upload in self._uploads(check_path(prefix.rstrip("/"))):
            self._abort(upload)

    def discard(self, names: Iterable[str]) -> None:
        cut = len(self._split(self._root + "/")[1])
        for name in names:
            for upload in self._uploads(name.rpartition("/")[0]):
                if upload["Key"][cut:] == name:
                    self._abort(upload)

    def _abort(self, upload: Any) -> None:
        request = {"Bucket": self._bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
        with suppress(StorageNotFound):  # completed or aborted meanwhile
            self._run(lambda: self._fs.call_s3("abort_multipart_upload", **request), "delete", upload["Key"])

    def _uploads(self, prefix: str) -> list[Any]:
        """Uploads in parts that were begun under a directory and neither completed nor aborted."""
        key = self._split(self._join(prefix) + "/")[1]
        found: list[Any] = []
        marker: dict[str, str] = {}
        while True:
            request = {"Bucket": self._bucket, "Prefix": key, **marker}
            answer = self._run(
                lambda r=request: self._fs.call_s3("list_multipart_uploads", **r), "list", prefix
            )
            found += [u for u in answer.get("Uploads", ()) if u["Key"].startswith(key)]
            if not answer.get("IsTruncated"):
                return found
            marker = {
                "KeyMarker": answer["NextKeyMarker"],
                "UploadIdMarker": answer.get("NextUploadIdMarker", ""),
            }

    @property
    def _bucket(self) -> str:
        return self._split(self._root)[0]

    @staticmethod
    def _split(path: str) -> tuple[str, str]:
        bucket, _, key = path.partition("/")
        return bucket, key

    def _key(self, path: str) -> str:
        key = super()._key(path)
        if "?versionId=" in key:
            raise ConfigError(
                field="storage_path", problem=f"{key!r} holds '?versionId=', which s3fs takes as a version."
            )
        return key
