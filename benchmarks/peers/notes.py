"""What the ranks of a peer noted of their steps, one JSON line each, and the times that come of it.

A note has the wall time, its kind ("entered" the program, "ready" to train, "step" ended), rank, world, pid
and node. Every rank appends to one file.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.recovery.cases import CHECKPOINT_EVERY, GIVE_UP_S, KEEP_ON, KILL_AFTER

POLL_S = 0.01

Note = dict[str, Any]


class Notebook:
    """One rank's end of the file."""

    def __init__(self, path: str, *, rank: int, world: int, node: str) -> None:
        self._file = os.open(path, os.O_APPEND | os.O_CREAT | os.O_WRONLY)
        self._me = {"rank": rank, "world": world, "pid": os.getpid(), "node": node}

    def note(self, kind: str, step: int, **more: Any) -> None:
        line = {"at": time.time(), "kind": kind, "step": step, **self._me, **more}
        os.write(self._file, (json.dumps(line) + "\n").encode())


def measure(notes: Sequence[Note], killed_at: float, planned: int) -> dict[str, Any] | None:
    """From the kill until all `planned` ranks of a new group ended a step, although that step is run again.

    `kill_to_regained_s`: until they ended one that was never run before.
    """
    old = {n["pid"] for n in notes if n["at"] <= killed_at}
    reached = max((n["step"] for n in notes if n["pid"] in old and n["kind"] == "step"), default=0)
    new = [n for n in notes if n["pid"] not in old and n["world"] == planned]
    first, regained = all_ended(new, planned, 0), all_ended(new, planned, reached)
    if first is None:
        return None
    entered = [n["at"] for n in new if n["kind"] == "entered"]
    ready = [n["at"] for n in new if n["kind"] == "ready"]
    return {
        "kill_to_step_s": first[1] - killed_at,
        "kill_to_entered_s": max(entered) - killed_at,
        "kill_to_ready_s": max(ready) - killed_at,
        "kill_to_regained_s": None if regained is None else regained[1] - killed_at,
        "first_step": first[0],
        "steps_redone": reached - first[0] + 1,
        "from": "storage" if first[0] > 1 else "fresh",
        "workers": planned,
    }


def all_ended(notes: Sequence[Note], planned: int, beyond: int) -> tuple[int, float] | None:
    """The first step greater than `beyond` that all ranks ended, and when the last one did."""
    ended: dict[int, dict[int, float]] = {}
    for n in notes:
        if n["kind"] == "step" and n["step"] > beyond:
            ended.setdefault(n["step"], {})[n["rank"]] = n["at"]
    whole = [(step, max(at.values())) for step, at in ended.items() if len(at) == planned]
    return min(whole, default=None)


def is_back(notes: Path, killed_at: float, planned: int) -> bool:
    found = measure(read(notes), killed_at, planned)
    if found is None or found["kill_to_regained_s"] is None:
        return False
    return newest(notes)["step"] >= found["first_step"] + found["steps_redone"] + KEEP_ON


def due(notes: Path, workers: int, after: int = KILL_AFTER) -> bool:
    last = newest(notes)
    return last["world"] == workers and last["step"] > after and last["step"] % CHECKPOINT_EVERY == 5


def newest(notes: Path) -> Note:
    """The last step that rank 0 ended."""
    own = [n for n in read(notes) if n["kind"] == "step" and n["rank"] == 0]
    return own[-1] if own else {"step": 0, "world": 0}


def read(notes: Path) -> list[Note]:
    lines = notes.read_text().splitlines() if notes.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def wait(until: Callable[[], bool], failed: list[str]) -> bool:
    deadline = time.monotonic() + GIVE_UP_S
    while not failed and time.monotonic() < deadline:
        if until():
            return True
        time.sleep(POLL_S)
    return False


def step_seconds(notes: Sequence[Note]) -> float | None:
    """Median from step to step on rank 0, within one process."""
    own = [n for n in notes if n["kind"] == "step" and n["rank"] == 0]
    gaps = [b["at"] - a["at"] for a, b in itertools.pairwise(own) if a["pid"] == b["pid"]]
    return statistics.median(gaps) if gaps else None
