"""Objects of an fsspec file system.

An exception inside `with filesystem.open(path, "wb")` publishes a truncated object on every fsspec file
system, so that form is never used: small objects go in one call, streams are committed or discarded by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from fsspec import AbstractFileSystem
from fsspec.asyn import AsyncFileSystem

from elastic_train.errors import StorageError, StorageNotFound
from elastic_train.storage.failures import statuses
from elastic_train.storage.retry import Retry, failures_ignored, failures_named
from elastic_train.storage.store import Blocks, Buffer, Names, Sink, check_path, check_prefix, exactly, spread

PRECONDITION_FAILED = 412
"""What a server answers to a create where something is, whatever its driver makes of it."""
BLOCK = 16 << 20
"""Bytes of one part of a streamed upload; S3 takes at most 10,000 parts, so 160 GB in one object."""


class ObjectStore:
    """Objects of any fsspec file system with a conditional create (`pipe_file(mode="create")`); of others it
    reads, and creates nothing. A root that begins with a slash is a path from the top of its system.
    """

    def __init__(
        self,
        make: Callable[[], AbstractFileSystem],
        *,
        root: str,
        url: str,
        retry: Retry | None = None,
    ) -> None:
        self._make, self._url = make, url
        self._root, self._lead = root.strip("/"), "/" if root.startswith("/") else ""
        self.retry = retry or Retry()
        self._fs: Any = self.retry.run(make, what="connect to", path=url)

    @property
    def url(self) -> str:
        return self._url

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        return self.read_ranges(path, [(start, length)])[0]

    def read_ranges(self, path: str, ranges: Sequence[tuple[int, int | None]]) -> Blocks:
        key = self._key(path)

        def work() -> Blocks:
            wanted = [r for r in ranges if r[1] != 0]  # a range of no bytes can't be asked for
            if len(wanted) == 1:
                start, end = _bounds(*wanted[0])
                got = [self._fs.cat_file(key, start=start, end=end)]
            else:
                bounds = [_bounds(*r) for r in wanted]
                starts, ends = [b[0] for b in bounds], [b[1] for b in bounds]
                got = (
                    self._fs.cat_ranges([key] * len(wanted), starts, ends, on_error="raise") if wanted else []
                )
            blocks = iter(got)
            return [bytes(next(blocks)) if r[1] != 0 else b"" for r in ranges]

        blocks = self._run(work, "read", path)
        return [
            exactly(b, path=self._named(path), start=r[0], length=r[1])
            for b, r in zip(blocks, ranges, strict=True)
        ]

    def read_into(self, path: str, start: int, buffers: Sequence[memoryview]) -> None:
        spread(self.read(path, start, sum(map(len, buffers))), buffers)

    def write(self, path: str, data: Buffer) -> None:
        key, value = self._key(path), bytes(data)
        self._run(lambda: self._fs.pipe_file(key, value), "write", path)

    def create(self, path: str, data: Buffer) -> None:
        key, value = self._key(path), bytes(data)
        if not _creates(self._fs):
            raise no_conditional_create(
                self.url, "its driver looks whether an object is there and then writes"
            )

        def work() -> None:
            try:
                self._fs.pipe_file(key, value, mode="create")
            except Exception as error:
                if PRECONDITION_FAILED in statuses(error):
                    raise FileExistsError(key) from error
                raise

        self._run(work, "create", path)

    @contextmanager
    def stream(self, path: str) -> Iterator[Sink]:
        with failures_named(what="write", path=self._named(path)):
            # `open` would keep every such file in the file system's transaction for ever; `_open` doesn't.
            file = self._fs._open(self._key(path), "wb", block_size=BLOCK, autocommit=False)
        with published(_UploadSink(file, self._named(path))) as sink:
            yield sink

    def list(self, prefix: str = "") -> Names:
        top = self._join(check_prefix(prefix))
        names = self._run(lambda: _find(self._fs, self._lead + top), "list", prefix)
        inside = (n.strip("/") for n in names if not n.endswith("/"))
        under = top + "/" if top else ""
        cut = len(self._root) + 1 if self._root else 0
        return sorted(n[cut:] for n in inside if n.startswith(under))

    def names(self, prefix: str = "") -> Names:
        top = self._join(check_prefix(prefix))
        try:
            found = self._run(lambda: self._fs.ls(self._lead + top, detail=True), "list", prefix)
        except StorageNotFound:
            return []
        files = (info["name"].strip("/") for info in found if info["type"] == "file")
        under = top + "/" if top else ""
        return sorted(
            name for n in files if n.startswith(under) and (name := n[len(under) :]) and "/" not in name
        )

    def unfinished(self, prefix: str = "") -> Names:
        return []

    def size(self, path: str) -> int:
        key = self._key(path)
        info = self._run(lambda: self._fs.info(key), "look at", path)
        if info["type"] != "file":
            raise StorageNotFound(
                path=self._named(path), operation="look at", problem="a directory is there."
            )
        return int(info["size"])

    def exists(self, path: str) -> bool:
        try:
            self.size(path)
        except StorageNotFound:
            return False
        return True

    def delete(self, paths: Iterable[str]) -> None:
        for path in paths:
            key = self._key(path)
            try:
                self._run(lambda key=key: self._fs.rm_file(key), "delete", path)
            except StorageNotFound:
                continue

    def delete_tree(self, prefix: str) -> None:
        self.delete(self.list(check_path(prefix.rstrip("/"))))

    def discard(self, names: Iterable[str]) -> None:
        """Nothing is ever unfinished here that has a name."""

    def _run(self, work: Callable[[], Any], what: str, path: str) -> Any:
        return self.retry.run(work, what=what, path=self._named(path), renew=self._renew)

    def _renew(self) -> None:
        """Connect again: a file system object keeps the credentials it was made with."""
        self._fs = self._make()

    def _join(self, path: str) -> str:
        return f"{self._root}/{path}".strip("/")

    def _key(self, path: str) -> str:
        return self._lead + self._join(check_path(path))

    def _named(self, path: str) -> str:
        return f"{self._url}/{path}"


def no_conditional_create(url: str, reason: str) -> StorageError:
    """Of a store that can't hold runs. `reason` is a clause."""
    return StorageError(
        path=url,
        operation="commit to",
        problem=f"{reason}, so two controllers could both commit. Use a store with conditional writes: "
        "a path, s3://, gs:// or abfs://.",
    )


class Publishing(Sink, Protocol):
    """A sink of which nothing is seen before `commit`, and nothing is left by `discard`."""

    def commit(self) -> None: ...
    def discard(self) -> None: ...


@contextmanager
def published(upload: Publishing) -> Iterator[Sink]:
    """What is written inside is published on a clean exit, and discarded on any other."""
    try:
        yield upload
        upload.commit()
    except BaseException:
        upload.discard()
        raise


class _UploadSink:
    """One upload in parts. The last call is `commit` or `discard`."""

    def __init__(self, file: Any, path: str) -> None:
        self._file, self._path = file, path

    def write(self, data: Buffer) -> None:
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        with failures_named(what="write", path=self._path):
            # The file sends all it has as one part, so it is fed one part at a time.
            for start in range(0, len(view), BLOCK):
                self._file.write(view[start : start + BLOCK])

    def commit(self) -> None:
        with failures_named(what="write", path=self._path):
            self._file.close()
            self._file.commit()

    def discard(self) -> None:
        self._file.closed = True  # or the destructor would flush, and start an upload after all
        with failures_ignored():
            self._file.discard()


def _creates(system: Any) -> bool:
    """Whether a driver brings a create of its own; that of fsspec is no condition of the store's."""
    if system.async_impl:
        return type(system)._pipe_file is not AsyncFileSystem._pipe_file
    return type(system).pipe_file is not AbstractFileSystem.pipe_file


def _find(system: Any, top: str) -> Iterable[str]:
    """Every file under a directory. fsspec's own walk leaves out what it can't list, and says nothing; file
    systems that list by prefix have a `find` of their own, which fails.
    """
    asks = getattr(type(system), "_find", None) if system.async_impl else type(system).find
    if asks in (AsyncFileSystem._find, AbstractFileSystem.find):
        return system.find(top, on_error=_unless_gone)
    return system.find(top)


def _unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _bounds(start: int, length: int | None) -> tuple[int | None, int | None]:
    """The range as fsspec has it; all of an object without a range, because an empty one has none."""
    if length is None:
        return (start or None), None
    return start, start + length
