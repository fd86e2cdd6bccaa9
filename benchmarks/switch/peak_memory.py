"""The most memory that each worker process has taken, from one mark to the next."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

RESET_PEAK = "5"  # proc(5), clear_refs: the peak begins anew at what is resident now


class PeakMemory:
    """Of processes of this machine, by worker. Shared memory that one has mapped and touched is counted."""

    def __init__(self) -> None:
        self._processes: dict[str, Path] = {}
        self._peaks: dict[str, int] = {}

    def add(self, worker: str, pid: int) -> None:
        self._processes[worker] = Path("/proc") / str(pid)

    def mark(self) -> None:
        """Measure from now on."""
        self._peaks = {}
        for process in self._processes.values():
            with suppress(OSError):  # it ended
                (process / "clear_refs").write_text(RESET_PEAK)

    def peaks(self) -> dict[str, int]:
        """Bytes since the mark. One that has ended stays with what it had when this was last asked."""
        for worker, process in self._processes.items():
            with suppress(OSError):
                for line in (process / "status").read_text().splitlines():
                    if line.startswith("VmHWM:"):
                        self._peaks[worker] = int(line.split()[1]) << 10
        return dict(self._peaks)
