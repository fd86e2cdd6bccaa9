"""A file system of its own, mounted from a file, that can hang, fill up and turn read-only. Needs root."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20
FILLER = "filler"


def why_not() -> str:
    """Why this machine cannot have such a mount; "" where it can."""
    missing = [name for name in ("mkfs.ext4", "mount", "umount", "fsfreeze") if shutil.which(name) is None]
    if missing:
        return f"there is no {', '.join(missing)}"
    if os.geteuid() != 0:
        return "mounting needs root"
    try:
        with real_mount(16):
            return ""
    except subprocess.CalledProcessError as error:
        return f"no mounts here: {error.stderr.strip()}"


@dataclass(frozen=True, kw_only=True)
class RealMount:
    """`path` is where it is mounted."""

    path: Path

    @contextmanager
    def hanging(self) -> Iterator[None]:
        """Writers wait in the kernel, where no signal reaches it, SIGKILL neither."""
        _call("fsfreeze", "--freeze", str(self.path))
        try:
            yield
        finally:
            _call("fsfreeze", "--unfreeze", str(self.path))

    @contextmanager
    def full(self) -> Iterator[None]:
        """No byte more has room."""
        filler = self.path / FILLER
        with filler.open("wb", buffering=0) as file:
            for size in (MIB, 4096):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError:
                    continue
        try:
            yield
        finally:
            filler.unlink()

    @contextmanager
    def read_only(self) -> Iterator[None]:
        """What it holds can be read."""
        self._remount("ro")
        try:
            yield
        finally:
            self._remount("rw")

    def _remount(self, mode: str) -> None:
        while True:
            try:
                return _call("mount", "-o", f"remount,{mode}", str(self.path))
            except subprocess.CalledProcessError as error:
                if "busy" not in error.stderr:  # a file is just being written
                    raise
                time.sleep(0.01)


@contextmanager
def real_mount(mebibytes: int) -> Iterator[RealMount]:
    """An empty one of that size; unmounted at the end, even while it is in use."""
    directory = Path(tempfile.mkdtemp(prefix="et-mount-"))
    image, path = directory / "image", directory / "mount"
    path.mkdir()
    try:
        with image.open("wb") as file:
            file.truncate(mebibytes * MIB)
        _call("mkfs.ext4", "-q", "-m", "0", str(image))
        _call("mount", "-o", "loop", str(image), str(path))
        try:
            yield RealMount(path=path)
        finally:
            _call("umount", "--lazy", str(path))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _call(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
