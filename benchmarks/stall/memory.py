"""Peak host memory of a process and its children, shared pages counted once, and how fast memory copies."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

EVERY_S = 0.05
COPIED = 128 * 2**20


class Peak:
    """Looks twenty times a second. `bytes` is the most that was there, above what was there at first."""

    def __init__(self) -> None:
        self._first = self._most = _resident()
        threading.Thread(target=self._look, daemon=True).start()

    @property
    def bytes(self) -> int:
        self._most = max(self._most, _resident())
        return self._most - self._first

    def _look(self) -> None:
        while True:
            time.sleep(EVERY_S)
            self._most = max(self._most, _resident())


def copy_bytes_s() -> float:
    """Bytes per second of one thread that copies between pages that were touched before."""
    source, target = np.ones(COPIED, np.uint8), np.ones(COPIED, np.uint8)
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        target[:] = source
        best = min(best, time.perf_counter() - began)
    return COPIED / best


def _resident() -> int:
    """Private pages of all processes, and the shared ones of the process that maps the most of them."""
    private, shared = 0, 0
    for pid in _family(os.getpid()):
        try:
            fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        except OSError:  # it has just ended
            continue
        private += _kib(fields.get("RssAnon"))
        shared = max(shared, _kib(fields.get("RssShmem")))
    return private + shared


def _family(pid: int) -> Iterator[int]:
    yield pid
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(word) for task in tasks for word in (task / "children").read_text().split()]
    except OSError:
        return
    for child in children:
        yield from _family(child)


def _kib(text: str | None) -> int:
    return int(text.split()[0]) * 1024 if text else 0
