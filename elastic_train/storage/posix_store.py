"""A directory of a POSIX file system as a store.

A file is written beside its final name, flushed to the device, given its name in one step (rename to
replace, hard link to create), and then the directory is flushed: fsync of the file alone doesn't keep its
name over a power cut (Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014). Modes follow the
umask.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path

from elastic_train.errors import StorageError, StorageNotFound
from elastic_train.storage.absent_names import asked_again, look_again
from elastic_train.storage.early_writeback import begin_writing
from elastic_train.storage.posix_walk import Directory, unless_gone, walk
from elastic_train.storage.retry import Retry, failures_named
from elastic_train.storage.store import (
    UNPUBLISHED,
    Blocks,
    Buffer,
    Names,
    Sink,
    check_path,
    check_prefix,
    exactly,
    short,
)

AHEAD = 8 << 20
"""Bytes that wait in memory before writeback to the device begins."""
VECTORS = 512
"""Buffers of one system call; Linux takes 1024."""
NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})


class PosixStore:
    """Objects are files under `root`, which the first write makes. One that was there and is gone is not made
    again: it was moved away, or what it is mounted on was, and may come back.
    """

    def __init__(self, root: Path, *, retry: Retry | None = None) -> None:
        self.root = root.absolute()
        with failures_named(what="look at", path=str(self.root)):
            self._there = self.root.is_dir()
        self.retry = retry or Retry()

    @property
    def url(self) -> str:
        return str(self.root)

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        return self.read_ranges(path, [(start, length)])[0]

    def read_ranges(self, path: str, ranges: Sequence[tuple[int, int | None]]) -> Blocks:
        target = self._at(path)

        def work() -> Blocks:
            file = self._open(target)
            try:
                return [
                    exactly(_pread(file, start, length), path=str(target), start=start, length=length)
                    for start, length in ranges
                ]
            finally:
                os.close(file)

        return self.retry.run(work, what="read", path=str(target))

    def read_into(self, path: str, start: int, buffers: Sequence[memoryview]) -> None:
        target = self._at(path)
        length = sum(map(len, buffers))

        def work() -> None:
            file = self._open(target)
            try:
                done = _preadv(file, start, buffers)
            finally:
                os.close(file)
            if done < length:
                raise short(str(target), start=start, length=length, there=done)

        self.retry.run(work, what="read", path=str(target))

    def write(self, path: str, data: Buffer) -> None:
        target = self._at(path)
        self.retry.run(lambda: self._publish(target, data, replace=True), what="write", path=str(target))

    def create(self, path: str, data: Buffer) -> None:
        target = self._at(path)
        try:
            self.retry.run(
                lambda: self._publish(target, data, replace=False), what="create", path=str(target)
            )
        except StorageError as error:
            if isinstance(error.__cause__, OSError) and error.__cause__.errno in NO_LINKS:
                remedy = " A commit needs hard links: put the run on a file system that has them, or on S3."
                raise StorageError(
                    path=error.path, operation="create", problem=error.problem + remedy
                ) from error
            raise

    @contextmanager
    def stream(self, path: str) -> Iterator[Sink]:
        target = self._at(path)
        temporary, file = self.retry.run(
            lambda: self._temporary_beside(target), what="write", path=str(target)
        )
        try:
            try:
                yield _FileSink(file, target)
                with failures_named(what="write", path=str(target)):
                    os.fsync(file)
            finally:
                os.close(file)
            with failures_named(what="write", path=str(target)):
                os.replace(temporary, target)  # noqa: PTH105 - beside fsync, the system call by its name
                _sync_directory(target.parent)
        except BaseException:
            _forget(temporary)
            raise

    def list(self, prefix: str = "") -> Names:
        found = (directory / n for directory, _, names in self._walk(prefix) for n in names)
        return sorted(self._name(f) for f in found if not f.name.startswith(UNPUBLISHED))

    def names(self, prefix: str = "") -> Names:
        top = self._under(prefix)
        found = self.retry.run(lambda: self._directories(top, deep=False), what="list", path=str(top))
        return sorted(n for _, _, names in found for n in names if not n.startswith(UNPUBLISHED))

    def unfinished(self, prefix: str = "") -> Names:
        left: Names = []
        for directory, inner, names in self._walk(prefix):
            left += [self._name(directory / n) for n in names if n.startswith(UNPUBLISHED)]
            if not inner and not names and directory != self.root:
                left.append(self._name(directory))  # killed between making the directory and the file
        return sorted(left)

    def size(self, path: str) -> int:
        target = self._at(path)
        found = self.retry.run(
            lambda: asked_again(lambda: _stat(target), target), what="look at", path=str(target)
        )
        if stat.S_ISDIR(found.st_mode):
            raise StorageNotFound(path=str(target), operation="look at", problem="a directory is there.")
        return found.st_size

    def exists(self, path: str) -> bool:
        try:
            self.size(path)
        except StorageNotFound:
            return False
        return True

    def delete(self, paths: Iterable[str]) -> None:
        for target in map(self._at, paths):
            self.retry.run(lambda t=target: t.unlink(missing_ok=True), what="delete", path=str(target))

    def delete_tree(self, prefix: str) -> None:
        target = self._at(prefix)

        def work() -> None:
            shutil.rmtree(target, onerror=unless_gone)
            with suppress(FileNotFoundError):  # the parent went too, by another deleter
                _sync_directory(target.parent)

        self.retry.run(work, what="delete", path=str(target))

    def discard(self, names: Iterable[str]) -> None:
        for name in names:
            directory, _, last = name.rpartition("/")
            if last.startswith(UNPUBLISHED):
                target = self._under(directory) / last
                self.retry.run(lambda t=target: t.unlink(missing_ok=True), what="delete", path=str(target))

    def _walk(self, prefix: str) -> list[Directory]:
        top = self._under(prefix)
        return self.retry.run(lambda: self._directories(top, deep=True), what="list", path=str(top))

    def _directories(self, top: Path, *, deep: bool) -> list[Directory]:
        """A directory and, `deep`, those in it; nothing where there is none."""

        def look() -> list[Directory]:
            return list(islice(walk(top), None if deep else 1))

        if found := look():
            return found
        look_again(top)
        return look()

    def _open(self, target: Path) -> int:
        return asked_again(lambda: _open_to_read(target), target)

    def _at(self, path: str) -> Path:
        return self.root / check_path(path)

    def _under(self, prefix: str) -> Path:
        return self.root / check_prefix(prefix)

    def _name(self, file: Path) -> str:
        return file.relative_to(self.root).as_posix()

    def _publish(self, target: Path, data: Buffer, *, replace: bool) -> None:
        for last in (False, False, True):  # a sweeper may take the temporary file for a killed writer's
            temporary, file = self._temporary_beside(target)
            try:
                try:
                    _write_all(file, data)
                    os.fsync(file)
                finally:
                    os.close(file)
                if replace:
                    os.replace(temporary, target)  # noqa: PTH105
                else:
                    os.link(temporary, target)
            except FileNotFoundError:
                if last:
                    raise
            else:  # what is there by its name is not made again, whatever becomes of its directory
                _sync_directory(target.parent)
                return
            finally:
                _forget(temporary)

    def _temporary_beside(self, target: Path) -> tuple[Path, int]:
        """A new file in the target's directory, open for writing. Its name is not derived from the target's
        length.
        """
        for last in (False, False, True):  # a deleter may take the empty directory away in between
            self._make_directory(target.parent)
            temporary = target.parent / (UNPUBLISHED + secrets.token_hex(8))
            try:
                return temporary, _open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            except FileNotFoundError:
                if last:
                    raise
        raise AssertionError

    def _make_directory(self, directory: Path) -> None:
        if directory.is_dir():
            return
        if self._there and not self.root.is_dir():
            gone = f"{self.root} is gone: it was deleted or moved away, or its mount was"
            raise OSError(errno.ESTALE, gone)
        _make_directory(directory)
        self._there = True


class _FileSink:
    """The device begins while more bytes come, so that the fsync at the end has little left to do."""

    def __init__(self, file: int, target: Path) -> None:
        self._file, self._target = file, target
        self._written = self._begun = 0

    def write(self, data: Buffer) -> None:
        with failures_named(what="write", path=str(self._target)):
            _write_all(self._file, data)
        self._written += len(data) if isinstance(data, bytes | bytearray) else data.nbytes
        if self._written - self._begun >= AHEAD:
            begin_writing(self._file, self._begun, self._written - self._begun)
            self._begun = self._written


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except NotADirectoryError as error:  # below a file there is nothing
        raise FileNotFoundError(str(path)) from error


def _open_to_read(path: Path) -> int:
    """A regular file: a pipe would be waited for, and a device has no end."""
    try:
        file = _open(path, os.O_RDONLY | os.O_NONBLOCK)
    except NotADirectoryError as error:
        raise FileNotFoundError(str(path)) from error
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return file


def _open(path: Path, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o666)


def _pread(file: int, start: int, length: int | None) -> bytes:
    wanted = os.fstat(file).st_size - start if length is None else length
    blocks: list[bytes] = []
    while wanted > 0 and (block := os.pread(file, min(wanted, 1 << 30), start)):
        blocks.append(block)
        start, wanted = start + len(block), wanted - len(block)
    return blocks[0] if len(blocks) == 1 else b"".join(blocks)


def _preadv(file: int, start: int, buffers: Sequence[memoryview]) -> int:
    """Fill the buffers as far as the file has bytes; how many it had."""
    rest = [b for b in buffers if len(b)]
    done = 0
    while rest and (count := os.preadv(file, rest[:VECTORS], start + done)):
        done += count
        while rest and count >= len(rest[0]):
            count -= len(rest.pop(0))
        if count:
            rest[0] = rest[0][count:]
    return done


def _write_all(file: int, data: Buffer) -> None:
    rest = memoryview(data).cast("B") if len(data) else memoryview(b"")
    while rest:
        rest = rest[os.write(file, rest[: 1 << 30]) :]


def _make_directory(directory: Path) -> None:
    """Make a directory and its parents, durably; on shared file systems others make the same ones
    meanwhile.
    """
    if directory.is_dir():
        return
    _make_directory(directory.parent)
    for last in (False, False, True):
        try:
            directory.mkdir()
        except FileExistsError:
            # Reported by network file systems before the directory can be seen, so it is looked at again.
            if directory.is_dir():
                return
            if last:
                raise
        else:
            _sync_directory(directory.parent)
            return


def _sync_directory(directory: Path) -> None:
    file = _open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno != errno.EINVAL:  # where it can't flush directories
            raise
    finally:
        os.close(file)


def _forget(temporary: Path) -> None:
    with suppress(OSError):
        temporary.unlink(missing_ok=True)
