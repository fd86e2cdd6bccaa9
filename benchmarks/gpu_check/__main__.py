"""What is claimed of GPUs, tried on one or two of them, and what saving costs there. No cluster, ten minutes.

python -m benchmarks.gpu_check [--device cpu|rehearsal] [--quick] [--json FILE] [--millions M]

First every claim of claims.py and failures.py: plans, moves between them, evaluation, loops, digests,
checkpoints, random numbers; breaks and deaths in the middle of a collective, a lost stage that is replayed,
memory that is too small and the plan that is taken then, a device that fails. Those that need two devices
are left out where there is one, and said to be. Then what snapshots cost:

`pinned_gb_s` is at what speed a snapshot of the whole state gets from the device into shared memory while
nothing else runs, `x_of_bus_limit` that over the fastest single copy of such size into pinned memory that was
measured. `blocked_ms` is what the training thread spends per snapshot, taken after every step;
`step_overhead_ratio` is how much longer a step is, and `overlap` the share of a snapshot's time that the step
does not show. `restored`: a second model that takes its state from a snapshot is equal to the first one, bit
by bit, and still is after a step of both. `recovered`: a process that trains is killed in the middle of a
copy, and what it had committed is taken from the memory that this process holds; `steps_lost` of its steps
are not there. Where there is no GPU the same code runs on the host, and what that does not measure is said.
On the rehearsal device it runs with streams, events and pinned memory, in times that mean nothing.
"""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks import record
from benchmarks.gpu_check.training import SLOTS, Snapshots, Training, device_of, hash_of, spans
from benchmarks.gpu_check.tried import tried
from benchmarks.stall.memory import copy_bytes_s
from elastic_train.checkpoint.engine.arena import Arena
from elastic_train.checkpoint.engine.audit import ALL
from elastic_train.testing.rehearsal.device import NAME as REHEARSAL

SHARED = Path("/dev/shm")
ON_HOST = (
    "pinned bandwidth and the limit of the bus: device and host are the same memory here; instead, what one "
    "thread copies is compared with the speed of memory",
    "overlap and stall of a device: the copies were made by a thread of the host beside the step, and share "
    "its cores",
    "order by events of a device, pinning by its driver, gathering by its kernels: the lane ran without them",
)
REHEARSED = (
    "every time: a rehearsal device computes with the CPU's kernels, and its bus is this machine's memory",
)
LIMIT_S = 120.0


@contextmanager
def segment(size: int) -> Iterator[tuple[Path, Arena]]:
    """Shared memory that outlives the process that copies into it; ours, as it is a peer store's in a run."""
    path = SHARED / f"gpu-check-{time.monotonic_ns()}"
    arena = Arena.create(path, size, slots=SLOTS)
    try:
        yield path, arena
    finally:
        path.unlink()


def bus_bytes_s(device: torch.device, size: int) -> float:
    """Bytes per second of the fastest plain copy from the device into pinned memory."""
    if device.type == "cpu":
        return copy_bytes_s()
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    best = float("inf")
    for _ in range(5):
        torch.accelerator.synchronize(device)
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.accelerator.synchronize(device)
        best = min(best, time.perf_counter() - began)
    return size / best


def alone(training: Training, arena: Arena) -> dict[str, Any]:
    """Snapshots with nothing beside them."""
    snapshots = Snapshots(training.device, arena)
    taken: list[float] = []
    for number in range(ALL + 5):
        training.step(snapshots.fence)
        if training.device.type != "cpu":
            torch.accelerator.synchronize(training.device)
        before = snapshots.counts
        snapshots.take(training)
        while snapshots.counts.delivered == before.delivered:
            snapshots.fence()
        if number >= ALL:  # the first ones are compared by content too
            taken.append(snapshots.counts.copy_s - before.copy_s)
    pinned = snapshots.lane.pinned
    snapshots.close()
    return {"copy_s": statistics.median(taken), "pinned": pinned}


def beside(training: Training, arena: Arena, steps: int) -> dict[str, float]:
    """A snapshot after every step, against the same steps without one, in turns."""
    snapshots = Snapshots(training.device, arena)
    for _ in range(ALL):
        training.step(snapshots.fence)
        snapshots.take(training)
    bare: list[float] = []
    saving: list[float] = []
    blocked: list[float] = []
    for number in range(4):
        training.step(snapshots.fence)
        before = snapshots.counts.blocked_s
        began = time.perf_counter()
        for _ in range(steps):
            training.step(snapshots.fence)
            if number % 2:
                snapshots.take(training)
        training.step(snapshots.fence)  # so that what the last one costs is counted
        (saving if number % 2 else bare).append((time.perf_counter() - began) / (steps + 1))
        if number % 2:
            blocked.append((snapshots.counts.blocked_s - before) / steps)
    torn = snapshots.counts.torn
    snapshots.close()
    assert not torn, "nobody writes to the state between two updates here"
    return {"step_s": min(bare), "saving_step_s": min(saving), "blocked_s": min(blocked)}


def restored(training: Training, millions: float, arena: Arena) -> bool:
    """Whether a model that takes a snapshot's state goes on as the one it was taken of."""
    snapshots = Snapshots(training.device, arena)
    snapshots.take(training)
    expected = training.digest()
    snapshots.fence()
    while snapshots.newest is None:
        snapshots.fence()
    other = Training(millions, training.device)
    other.step()
    other.load(snapshots.newest.step, snapshots.newest.buffer.data.data, spans(snapshots.newest))
    same = other.digest() == expected
    other.step()
    training.step(snapshots.fence)
    snapshots.close()
    return same and other.digest() == training.digest()


def recovered(millions: float, device: torch.device, path: Path, arena: Arena) -> tuple[bool, int]:
    """Kill a process that trains while it copies; whether its state is here, and how many steps are not."""
    command = [sys.executable, "-m", "benchmarks.gpu_check.training", "--segment", str(path)]
    command += ["--size", str(arena.size), "--device", str(device), "--millions", str(millions)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    kept: list[dict[str, Any]] = []
    committed = 0
    try:
        for line in process.stdout:
            word = json.loads(line)
            committed = word.get("committed", committed)
            kept += [word] if "kept" in word else []
            if kept and "committed" in word and committed >= 5:  # its copy has just begun
                break
    finally:
        process.send_signal(signal.SIGKILL)
        rest, _ = process.communicate(timeout=LIMIT_S)
    reported = [json.loads(line) for line in rest.splitlines() if line.endswith("}")]
    kept += [word for word in reported if "kept" in word]
    committed = max([committed, *(word["committed"] for word in reported if "committed" in word)])
    for word in reversed(kept):
        if arena.stamp(word["slot"]) != word["stamp"]:
            continue  # a newer one was being written there
        memory = arena.slot(word["slot"])
        training = Training(millions, device)
        training.step()
        training.load(word["kept"], memory, [tuple(place) for place in word["places"]])
        sound = hash_of(memory, word["places"]) == word["digest"] == training.digest()
        return sound, committed - word["kept"]
    return False, committed


def check(device: torch.device, *, millions: float, steps: int) -> tuple[dict[str, Any], list[str]]:
    """All figures, and in words what was not measured."""
    training = Training(millions, device)
    training.step()
    size = training.bytes()
    with segment(size) as (_, arena):
        limit = bus_bytes_s(device, size)
        single = alone(training, arena)
        pair = beside(training, arena, steps)
        same = restored(training, millions, arena)
    del training
    with segment(size) as (path, arena):
        back, lost = recovered(millions, device, path, arena)
    over_s = pair["saving_step_s"] - pair["step_s"]
    found: dict[str, Any] = {
        "device": str(device)
        if device.type == "cpu"
        else torch.get_device_module(device).get_device_name(device),
        "state_mb": size / 1e6,
        "limit_gb_s": limit / 1e9,
        "copied_gb_s": size / single["copy_s"] / 1e9,
        "pinned": single["pinned"],
        "copy_ms": 1e3 * single["copy_s"],
        "step_ms": 1e3 * pair["step_s"],
        "saving_step_ms": 1e3 * pair["saving_step_s"],
        "blocked_ms": 1e3 * pair["blocked_s"],
        "overlap": min(max(1 - over_s / single["copy_s"], 0.0), 1.0),
        "restored": same,
        "recovered": back,
        "steps_lost": lost,
    }
    missing = list({"cpu": ON_HOST, REHEARSAL: REHEARSED}.get(device.type, ()))
    if device.type != "cpu" and not found["pinned"]:
        missing.append("pinned bandwidth: the driver refused to pin shared memory")
    if single["copy_s"] > pair["step_s"]:
        missing.append(
            f"a whole overlap: a snapshot takes {found['copy_ms']:.0f} ms, a step {found['step_ms']:.0f} ms"
        )
    return found, missing


def headline(found: dict[str, Any]) -> dict[str, float | None]:
    pinned = found["copied_gb_s"] if found["pinned"] else None
    return {
        "blocked_ms": found["blocked_ms"],
        "overlap": found["overlap"],
        "step_overhead_ratio": found["saving_step_ms"] / found["step_ms"],
        "pinned_gb_s": pinned,
        "x_of_bus_limit": record.ratio(pinned, found["limit_gb_s"]),
        "restored": float(found["restored"]),
        "recovered": float(found["recovered"]),
        "steps_lost": float(found["steps_lost"]),
    }


def _row(claim: Mapping[str, Any]) -> tuple[Any, ...]:
    """A claim as a row of the report."""
    held = {True: "yes", False: "NO", None: "not tried"}[claim["held"]]
    figures = {
        k: v for k, v in claim.items() if k not in ("claim", "says", "held", "seconds", "why", "whole")
    }
    said = ", ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in figures.items())
    return claim["claim"], held, claim.get("seconds"), claim.get("why", said)


def main() -> None:
    parser = record.options(__doc__ or "")
    found = torch.accelerator.current_accelerator(check_available=True)
    parser.add_argument("--device", default="cpu" if found is None else found.type)
    parser.add_argument("--millions", type=float, default=0.0, help="million parameters")
    options = parser.parse_args()
    device = device_of(options.device)
    small = options.quick or device.type in ("cpu", REHEARSAL)
    count = 2 if device.type in ("cpu", REHEARSAL) else min(torch.accelerator.device_count(), 2)
    claims = tried(device, count)
    print(record.table(("claim", "held", "s", "found"), map(_row, claims)), flush=True)
    found, missing = check(
        device, millions=options.millions or (8 if small else 100), steps=5 if small else 20
    )
    missing += [f"{claim['claim']}: {claim['why']}" for claim in claims if claim["held"] is None]
    failed = [f"{claim['claim']}: {claim['why']}" for claim in claims if claim["held"] is False]
    whole = record.record(
        "gpu_check",
        results=[*claims, found],
        headline=headline(found) | {"claims_held": float(sum(claim["held"] is True for claim in claims))},
        not_measured=missing,
        device=str(device),
    )
    for name, value in found.items():
        print(f"{name:16} {value:.4g}" if isinstance(value, float) else f"{name:16} {value}")
    for words in missing:
        print(f"not measured: {words}")
    record.finish(whole, options.json)
    if failed:
        raise SystemExit("does not hold: " + "; ".join(failed))
    if not (found["restored"] and found["recovered"] and found["steps_lost"] <= 1):
        raise SystemExit("a state that was committed did not come back")


if __name__ == "__main__":
    main()
