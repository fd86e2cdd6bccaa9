"""Counts reads of files below a directory, by whatever process: the kernel says so (inotify)."""

from __future__ import annotations

import ctypes
import os
import select
import struct
import threading
from pathlib import Path
from types import TracebackType

READ, CREATED, MOVED, IS_DIRECTORY = 0x1, 0x100, 0x80, 0x40000000
EVENT = struct.Struct("iIII")


class FileReads:
    """Use as a context manager. Counts files with this suffix."""

    def __init__(self, directory: Path, suffix: str) -> None:
        self._names: list[str] = []
        self._news = threading.Condition()
        self._directory, self._suffix, self._watched = directory, suffix, dict[int, Path]()
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._file = self._libc.inotify_init1(os.O_CLOEXEC)
        self._over, self._end = os.pipe()
        self._watch(directory)
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def names(self) -> list[str]:
        """The files that were read so far, once per notice."""
        mark = self._directory / f"mark{self._suffix}"  # notices come in order: those before it are there
        mark.write_bytes(b"mark")
        mark.read_bytes()
        with self._news:
            assert self._news.wait_for(lambda: mark.name in self._names, 100)
            self._names.remove(mark.name)
            return list(self._names)

    def _watch(self, directory: Path) -> None:
        """This directory and all that are in it by now; those that come later say so."""
        number = self._libc.inotify_add_watch(self._file, os.fsencode(directory), READ | CREATED | MOVED)
        if number < 0:  # gone again
            return
        self._watched[number] = directory
        for inner in [path for path in directory.iterdir() if path.is_dir()]:
            self._watch(inner)

    def _follow(self) -> None:
        while True:
            ready, _, _ = select.select([self._file, self._over], [], [])
            if self._file not in ready:
                return
            data = os.read(self._file, 1 << 16)
            while data:
                number, mask, _, length = EVENT.unpack_from(data)
                name = data[EVENT.size : EVENT.size + length].rstrip(b"\0").decode()
                data = data[EVENT.size + length :]
                if mask & IS_DIRECTORY and mask & (CREATED | MOVED):
                    self._watch(self._watched[number] / name)
                elif mask & READ and name.endswith(self._suffix):
                    with self._news:
                        self._names.append(name)
                        self._news.notify_all()

    def __enter__(self) -> FileReads:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.write(self._end, b"x")
        self._thread.join()
        for file in (self._file, self._over, self._end):
            os.close(file)
