"""Storage of a boundary log: reused buffers in memory, spilled to a local file."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch


@dataclass(slots=True, kw_only=True, eq=False)
class KeptTensor:
    """A kept tensor: its memory, or its place in the file."""

    dtype: torch.dtype
    shape: torch.Size
    nbytes: int
    data: torch.Tensor | None  # uint8
    offset: int = 0


def copied(tensor: torch.Tensor, data: torch.Tensor) -> KeptTensor:
    """The tensor's values in a buffer of its size."""
    if data.numel():
        data.view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return KeptTensor(dtype=tensor.dtype, shape=tensor.shape, nbytes=data.numel(), data=data)


class LogBuffers:
    """Not safe for several threads."""

    def __init__(self, *, memory: int, disk: int, directory: Path | None) -> None:
        self._memory, self._disk = memory, disk if directory is not None else 0
        self._directory = directory
        self._file: IO[bytes] | None = None
        self._end = 0
        self._holes: dict[int, list[int]] = {}  # offsets of given-back places in the file, by size
        self._spare: dict[int, list[torch.Tensor]] = {}
        self._spare_bytes = 0
        self.memory_used = 0
        self.disk_used = 0

    def buffer(self, size: int) -> torch.Tensor | None:
        """Host memory for a copy; None where even alone it would not fit."""
        if size > self._memory:
            return None
        spare = self._spare.get(size)
        if not spare:
            return torch.empty(size, dtype=torch.uint8)
        self._spare_bytes -= size
        return spare.pop()

    def fits(self, entry: KeptTensor) -> bool:
        return self.memory_used + entry.nbytes <= self._memory

    def take(self, entry: KeptTensor) -> None:
        self.memory_used += entry.nbytes

    def spill(self, entry: KeptTensor) -> bool:
        """Move an entry to the file; False where that is full or cannot be written."""
        assert entry.data is not None
        if self.disk_used + entry.nbytes > self._disk:
            return False
        holes = self._holes.get(entry.nbytes)
        offset = holes.pop() if holes else self._end
        try:
            file = self._opened()
            file.seek(offset)
            file.write(entry.data.numpy().tobytes())
        except OSError:
            return False
        self._end = max(self._end, offset + entry.nbytes)
        self._keep_spare(entry)
        entry.data, entry.offset = None, offset
        self.memory_used -= entry.nbytes
        self.disk_used += entry.nbytes
        return True

    def read(self, entry: KeptTensor) -> torch.Tensor:
        """A tensor of its own."""
        data = entry.data
        if data is None:
            assert self._file is not None
            self._file.seek(entry.offset)
            data = torch.frombuffer(bytearray(self._file.read(entry.nbytes)), dtype=torch.uint8)
        if not entry.nbytes:
            return torch.empty(entry.shape, dtype=entry.dtype)
        return data.clone().view(entry.dtype).view(entry.shape)

    def give_back(self, entry: KeptTensor) -> None:
        if entry.data is None:
            self.disk_used -= entry.nbytes
            self._holes.setdefault(entry.nbytes, []).append(entry.offset)
        else:
            self.memory_used -= entry.nbytes
            self._keep_spare(entry)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _keep_spare(self, entry: KeptTensor) -> None:
        """Warm memory for the next tensor of the size: the first touch is what costs."""
        assert entry.data is not None
        if self._spare_bytes + entry.nbytes <= self._memory:
            self._spare.setdefault(entry.nbytes, []).append(entry.data)
            self._spare_bytes += entry.nbytes

    def _opened(self) -> IO[bytes]:
        """A file without a name: it goes with the process."""
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._directory)  # noqa: SIM115 - open as long as the log
        return self._file
