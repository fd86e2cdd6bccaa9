"""One process of benchmarks/stall: trains with one system that saves, prints what it measured as JSON."""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch._C._distributed_c10d import TCPStore

from benchmarks.stall.memory import Peak, copy_bytes_s
from benchmarks.stall.peers import PEERS
from benchmarks.stall.systems import SYSTEMS, Nothing, System, Tensors

WARM_UP = 2
FIRST = 2
"""Saves before those that are measured: what a system makes or learns in them is told on its own."""
HASTY = 2
"""Saves after those that are measured, each followed by an update as soon as one can be: those are read."""


def model_of(millions: float) -> tuple[nn.Module, torch.Tensor]:
    """Square layers that add up to that many million parameters, and a batch whose step outlasts a copy."""
    width = 1024 if millions >= 8 else 512
    layers = max(int(millions * 1e6 / width**2), 1)
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, width, bias=False), nn.GELU()]
    return nn.Sequential(*parts), torch.randn(64, width)


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> Tensors:
    found: Tensors = {}
    for name, parameter in model.named_parameters():
        found[f"r{rank}.{name}"] = parameter.detach()
        for state, value in optimizer.state[parameter].items():
            if value.ndim:
                found[f"r{rank}.{name}.{state}"] = value
    return found


def fingerprint(tensors: Tensors) -> str:
    mixed = xxhash.xxh3_128()
    for name in sorted(tensors):
        mixed.update(tensors[name].detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return mixed.hexdigest()


class Training:
    """A loop that anybody would write, with the two moments at which a system may act."""

    def __init__(self, millions: float, rank: int) -> None:
        self.model, self._batch = model_of(millions)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self._rank = rank
        self.marked: dict[int, str] = {}

    def step(self, number: int, system: System, save: bool) -> tuple[float, float]:
        """Seconds of the whole step, and of them what the system took."""
        began = time.perf_counter()
        self.model(self._batch).square().mean().backward()
        fence = time.perf_counter()
        system.before_update()
        stall = time.perf_counter() - fence
        self._update()
        if save:
            tensors = self.tensors()
            saving = time.perf_counter()
            system.save(number, tensors)
            stall += time.perf_counter() - saving
        return time.perf_counter() - began, stall

    def save_in_haste(self, number: int, system: System) -> None:
        """Save, note the fingerprint of what is saved, and update again as soon as that may be."""
        self.model(self._batch).square().mean().backward()
        tensors = self.tensors()
        self.marked[number] = fingerprint(tensors)
        system.save(number, tensors)
        system.before_update()
        self._update()

    def _update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self) -> Tensors:
        return tensors_of(self.model, self.optimizer, self._rank)


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    training = Training(args.millions, args.rank)
    idle = Nothing(args.directory, args.rank)
    for number in range(-WARM_UP, 0):
        training.step(number, idle, False)
    size = sum(t.nbytes for t in training.tensors().values())
    bare = [training.step(0, idle, False)[0] for _ in range(args.bare)]
    copied_s = size / copy_bytes_s()
    memory = Peak()
    system = (SYSTEMS | PEERS)[name](args.directory, args.rank)
    saving = name != "none"
    first = [training.step(number, system, saving)[1] for number in range(FIRST)]
    gc.disable()
    steps, stalls, saves = [], [], 0
    for number in range(1, args.steps + 1):
        save = saving and number % args.every == 0
        taken, stall = training.step(FIRST - 1 + number, system, save)
        steps.append(taken)
        stalls.append(stall)
        saves += save
    last = FIRST + args.steps
    stalls.append(training.step(last, system, False)[1])
    counts = getattr(system, "counts", None)
    skipped = counts.skipped if counts is not None else 0
    for number in range(last + 1, last + 1 + HASTY if saving else 0):
        training.save_in_haste(number, system)
    system.close()
    peak = memory.bytes
    read: list[bool] = []
    for number, expected in sorted(training.marked.items()):  # of those that were skipped nothing is found
        found = system.read(number, training.tensors())
        if found is not None:
            read.append(fingerprint(found) == expected)
    return {
        "system": name,
        "rank": args.rank,
        "state_mb": size / 1e6,
        "steps": len(steps),
        "saves": saves,
        "bare_step_ms": 1e3 * statistics.median(bare),
        "step_ms": 1e3 * statistics.mean(steps),
        "blocked_ms": 1e3 * sum(stalls) / max(saves - skipped, 1),
        "first_ms": 1e3 * max(first),
        "skipped": skipped,
        "torn": None if not read else not all(read),
        "memory_mb": peak / 1e6,
        "copy_ms": 1e3 * copied_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--system", required=True, choices=[*SYSTEMS, *PEERS])
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--millions", type=float, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--every", type=int, required=True)
    parser.add_argument("--bare", type=int, default=4)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--port", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    store = TCPStore("127.0.0.1", args.port, args.workers, is_master=args.rank == 0)
    dist.init_process_group("gloo", store=store, rank=args.rank, world_size=args.workers)
    result = measure(args.system, args)
    dist.barrier()
    print("RESULT " + json.dumps(result), flush=True)
    os._exit(0)  # peers leave threads and processes that would be waited for


if __name__ == "__main__":
    main()
